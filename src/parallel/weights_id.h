// Which weights a checkpoint's layer has, in few reads: what ranks that open it each for themselves
// compare.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// A hash of how the checkpoint is to be read, and of the layer's tensors of its first, middle and
// last expert and the shared one: names, shapes, and up to 512 bytes of each. The same for copies
// of a checkpoint in other files, whatever experts a rank reads.
Result<std::string> weights_id(const Checkpoint& checkpoint, int64_t layer);

}  // namespace nvfp4_moe::internal
