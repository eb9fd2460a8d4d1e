// A model type that is not known: the rules that the caller names for it
// (CheckpointOptions::family), and the advice which to name. Private to src/checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/model_config.h"
#include "checkpoint/model_types.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

inline constexpr std::string_view kUnknownModelType = "unknown_model_type";  // a finding's id

// The rules of a model type, or of a family if all of its model types have the same.
Result<const ModelRow*> rules_of_family(std::string_view family);

// Refuses, by name, a field that may change what the experts compute and that the rules do not
// read. config: the language model's part.
Status check_unread_fields(const Json& config, const ModelRow& row);

struct Advice {
  std::string text;   // one sentence for an error message
  int64_t scans = 0;  // how often all names of the files were read
};
// How the files of an unknown model type could be read. Tries the rules of every known model type,
// and rules that lead to the same reading once. They must explain all experts' names, and the
// shapes of each layer's first expert.
Advice advise_family(const TensorIndex& index, const ParsedConfigs& files);

}  // namespace nvfp4_moe::internal
