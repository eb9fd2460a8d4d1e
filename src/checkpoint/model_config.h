// config.json and hf_quant_config.json as a ModelInfo: which family, which sizes, which format the
// experts claim to have.
//
// Pure functions of the two texts: no file is touched, which makes this a fuzz target. Nothing is
// guessed: a model type that is not in the table is refused by name, a field that the family needs
// and the file lacks is an error with the field's name, and a quantization this library does not
// decode exactly is refused with the reason. Which of the declared layers exist is the Checkpoint's
// business; here `layers` holds what the config declares.
#pragma once

#include <string_view>

#include "checkpoint/checkpoint.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Far above any model, far below what could exhaust memory or overflow a product of three.
inline constexpr int64_t kMaxModelExperts = int64_t{1} << 16;
inline constexpr int64_t kMaxModelSize = int64_t{1} << 20;
inline constexpr int64_t kMaxModelLayers = int64_t{1} << 14;

// hf_quant_json is empty if the checkpoint has no hf_quant_config.json. Errors: kBadInput for what
// is wrong or missing, kUnsupported for what is legal but not here.
Result<ModelInfo> parse_model_config(std::string_view config_json, std::string_view hf_quant_json);

}  // namespace nvfp4_moe::internal
