// MoeConfig from Python: parses and checks the JSON that the package's MoeConfig dataclass writes.
#pragma once

#include <string>

#include "core/config.h"
#include "errors.h"
#include "moe/config_json.h"

namespace nvfp4_moe::internal::python {

// A bad field is a caller's argument here, not a file's content, and raises ValueError.
inline MoeConfig config_of(const std::string& json) {
  auto options = moe_options_from_json(json);
  if (!options.ok()) fail(options.status().message());
  return take(MoeConfig::make(*options));
}

}  // namespace nvfp4_moe::internal::python
