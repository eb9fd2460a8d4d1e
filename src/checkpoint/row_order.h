// Which rows of a tensor that holds gate and up are whose: by family and name, or as the caller
// says. Private to the room.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

// Sets names.order, if gate and up are one tensor, which is called `tensor`. Returns an error,
// which says how to decide it, if the order is unknown.
Status set_row_order(const CheckpointOptions& options, const ModelInfo& model, int64_t layer,
                     const std::string& tensor, ExpertNames& names, FindingList& findings);

}  // namespace nvfp4_moe::internal
