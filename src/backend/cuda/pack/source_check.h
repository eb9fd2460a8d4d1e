// The host's checks of an expert's arrays, for arrays on the layer's device.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device/check.h"

namespace nvfp4_moe::internal::cuda {

// Device scratch memory for check_device_source; 16-byte aligned.
inline constexpr int64_t kSourceCheckBytes = 32 << 10;

// Returns the codes of blocks with scale 0 that are not all 0, ordered by projection and block.
// kInvalidArgument if an array is not in the memory of `device`; kBadInput with the message of
// illegal_block_scale. Runs in source.stream and waits for it; reads no array on the host.
Result<std::vector<ZeroScaleCodes>> check_device_source(const ExpertSource& source, int device,
                                                        std::byte* scratch);

}  // namespace nvfp4_moe::internal::cuda
