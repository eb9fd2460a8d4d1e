// Finds a model's layers with experts from its config.json.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/model_types.h"
#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// The number of layers. Nemotron-3 Ultra's config has null for it, and only the list gives it.
Result<int64_t> count_layers(const Json& config, const ModelRow& row, std::string_view model_type);

// The numbers of the MoE layers among `count`, in order, from a list in the config or from the rule
// of its type.
Status read_layers(const Json& config, const ModelRow& row, int64_t count,
                   std::vector<int64_t>& layers);

}  // namespace nvfp4_moe::internal
