// Which of a model's layers have experts, by its config.json.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/model_types.h"
#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// How many layers there are. Nemotron-3 Ultra's config has null for it, and the list alone says.
Result<int64_t> count_layers(const Json& config, const ModelRow& row, std::string_view model_type);

// The numbers of the MoE layers among `count`, in order, by a list that the config has or by the
// rule of its type.
Status read_layers(const Json& config, const ModelRow& row, int64_t count,
                   std::vector<int64_t>& layers);

}  // namespace nvfp4_moe::internal
