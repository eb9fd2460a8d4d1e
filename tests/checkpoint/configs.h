// Config files of small models, and changes of them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/model_config.h"
#include "checkpoint/quant_config.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

using nlohmann::json;

// The builder's config after a JSON merge patch, in which null removes a field.
inline json config_of(const char* type, const char* patch = "{}",
                      SourceFormat format = SourceFormat::kModelOpt) {
  CheckpointBuilder builder({.model_type = type, .format = format, .layers = 1, .num_experts = 4});
  builder.config().merge_patch(json::parse(patch));
  return builder.config();
}

inline Result<ModelInfo> parsed(const json& config, const json& hf_quant = nullptr) {
  return parse_model_config(config.dump(), hf_quant.is_null() ? "" : hf_quant.dump());
}

}  // namespace nvfp4_moe::internal::test
