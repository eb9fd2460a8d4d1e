// Which rows of a tensor that holds gate and up belong to which: by family and name, or from the
// caller's options. Private to src/checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

// Sets names.order, if gate and up are one tensor, which is called `tensor`. If the order is
// unknown, returns an error that explains how to decide it.
Status set_row_order(const CheckpointOptions& options, const ModelInfo& model, int64_t layer,
                     const std::string& tensor, ExpertNames& names, FindingList& findings);

}  // namespace nvfp4_moe::internal
