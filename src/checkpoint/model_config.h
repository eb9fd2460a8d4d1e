// config.json and hf_quant_config.json as a ModelInfo: family, sizes, and the declared format of
// the experts.
//
// These are pure functions of the two texts. They touch no file, so they are a fuzz target. Nothing
// is guessed: a model type that is not in the table is refused by name, a missing field that the
// family needs is an error with the field's name, and a quantization that this library does not
// decode exactly is refused with the reason. `layers` has what the config declares; the Checkpoint
// finds out which of them exist.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// Far above any model, and far below sizes that could exhaust memory or overflow a product of
// three.
inline constexpr int64_t kMaxModelExperts = int64_t{1} << 16;
inline constexpr int64_t kMaxModelSize = int64_t{1} << 20;
inline constexpr int64_t kMaxModelLayers = int64_t{1} << 14;

struct HfQuantization {
  Json quantization;
  std::string producer;  // name and version
};

// Both texts, parsed once, so that several families' rules may read them.
struct ParsedConfigs {
  Json config;  // an object
  // The error of hf_quant_config.json counts only if the file is read. Empty if there is no such
  // file.
  std::optional<Result<HfQuantization>> hf_quant;
};
// hf_quant_json is empty if the checkpoint has no hf_quant_config.json.
Result<ParsedConfigs> parse_config_files(std::string_view config_json,
                                         std::string_view hf_quant_json);

// Errors: kBadInput for a wrong or missing field, kUnsupported for a valid one that is not
// implemented.
// family: CheckpointOptions::family. An unknown model type without it is the finding
// kUnknownModelType (unknown_model.h).
Result<ModelInfo> read_model_config(const ParsedConfigs& files, std::string_view family = {});
Result<ModelInfo> parse_model_config(std::string_view config_json, std::string_view hf_quant_json,
                                     std::string_view family = {});

}  // namespace nvfp4_moe::internal
