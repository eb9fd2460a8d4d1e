// Which activation format a checkpoint's layer runs with if the caller does not ask for one. The rule is a table in
// docs/numerics.md (section 2); everything that resolves "auto" calls it here.
#pragma once

#include <string>
#include <string_view>

#include "core/config.h"
#include "core/status.h"

namespace nvfp4_moe {

struct ChosenFormat {
  ActivationFormat format = ActivationFormat::kBf16;
  std::string because;  // a clause that follows "because"
};

// The rule. declared: bf16 (weight-only, or floats), nvfp4 or fp8. backend: the name of a backend, of this build or of
// another one. The result is never less precise than `declared`.
Result<ChosenFormat> choose_activation_format(ActivationFormat declared, std::string_view backend);

}  // namespace nvfp4_moe
