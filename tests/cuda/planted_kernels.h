// Kernels for tests of what happens after a fault.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::test {

// Enqueues a kernel that flips a high bit of a byte.
cudaError_t flip_bit(uint8_t* byte, cudaStream_t stream);
// Enqueues a kernel that runs until *end, in mapped host memory, is not 0.
cudaError_t wait_until_set(const int* end, cudaStream_t stream);

}  // namespace nvfp4_moe::internal::test
