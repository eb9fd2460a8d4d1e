// The host's checks of an expert's arrays, for arrays on the layer's device.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device/check.h"

namespace nvfp4_moe::internal::cuda {

// Device memory that check_device_source works in; 16-byte aligned.
inline constexpr int64_t kSourceCheckBytes = 32 << 10;

// The codes that blocks of scale 0 hold where they are not all 0, in the order of projections and
// blocks. kInvalidArgument if an array is not in the memory of `device`, kBadInput with the words
// of illegal_block_scale. Runs in source.stream, which it waits for; reads no array on the host.
Result<std::vector<ZeroScaleCodes>> check_device_source(const ExpertSource& source, int device,
                                                        std::byte* scratch);

}  // namespace nvfp4_moe::internal::cuda
