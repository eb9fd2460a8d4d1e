// Chooses the activation format of a checkpoint's layer if the caller does not. The rule is a table
// in docs/explanation/numerics.md (section 2). All code that resolves "auto" calls it here.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "core/config.h"
#include "core/plan.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct ChosenFormat {
  ActivationFormat format = ActivationFormat::kBf16;
  std::string because;  // a clause that follows "because"
};

// The rule. declared: bf16 (weight-only, or floats), nvfp4 or fp8. backend: the name of a backend,
// of this build or of another. The result is never less precise than `declared`.
Result<ChosenFormat> choose_activation_format(ActivationFormat declared, std::string_view backend);

// Applies the rule to a layer on a device: takes the first backend (`forced` by name, or by
// priority if it is "auto") that supports the layer in the rule's format or a more precise one.
// options.activation_format is the declared format. If the options set a scale other than
// dynamic_token, the declared format is kept, since the scale belongs to it.
Result<ChosenFormat> choose_activation_format(const MoeOptions& options, const DeviceFacts& device,
                                              const std::string& forced);

struct LayerOptions;
// `options` with the format that the rule chooses for the layer's device and backend.
// options.activation_format is the declared format.
Result<MoeOptions> with_chosen_format(MoeOptions options, const LayerOptions& layer);

// Why a layer runs in `format`, as a clause that follows "because", whether the rule or the caller
// chose it.
std::string reason_of_format(ActivationFormat format, const DeclaredActivations& declared,
                             std::string_view backend);

}  // namespace nvfp4_moe::internal
