// Reads the experts' activation and its numbers from a model's config.json.
#pragma once

#include "checkpoint/model_types.h"
#include "core/config.h"
#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// Sets options' activation, limits and slope as the row's rule reads them. kUnsupported for another
// activation, or for a limit that the rule does not know.
Status read_activation(const Json& config, const ModelRow& row, MoeOptions& options);

}  // namespace nvfp4_moe::internal
