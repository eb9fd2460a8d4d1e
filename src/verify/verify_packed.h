// Step b of verify: unpacks a backend's packed experts and compares them with the file's own bytes.
#pragma once

#include <cstdint>
#include <functional>

#include "checkpoint/checkpoint.h"
#include "moe/layer.h"
#include "verify/verify.h"

namespace nvfp4_moe::internal {

// Compares every local expert of `layer` (and its shared expert) with the checkpoint's. Errors are
// those of reading or unpacking; differences are faults in the result. `on_expert` is called after
// each expert and may stop the walk.
Result<PackedCheck> check_packed(const Checkpoint& checkpoint, int64_t number,
                                 const MoeLayer& layer,
                                 const std::function<Status(int64_t expert)>& on_expert);

}  // namespace nvfp4_moe::internal
