// Identifies the weights of a checkpoint's layer with few reads, so that ranks that open the
// checkpoint separately can compare them.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// A hash of how the checkpoint is interpreted, and of tensors of the layer's first, middle and last
// expert and of the shared expert: names, shapes, and up to 512 bytes of each. Copies of a
// checkpoint in other files have the same hash, no matter which experts a rank reads.
Result<std::string> weights_id(const Checkpoint& checkpoint, int64_t layer);

}  // namespace nvfp4_moe::internal
