// stmatrix: stores a warp's fragments to shared memory as 8 x 8 matrices of 16-bit elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// stmatrix.trans of 2 or 1 matrices, stored transposed: a lane passes elements (r, 2c) and (r, 2c +
// 1) of each, r = lane / 4, c = lane % 4; lane 8i + n passes the address of column n of matrix i, a
// multiple of 16.
__device__ inline void stmatrix_trans(uint32_t address, const uint32_t (&pairs)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(pairs[0]), "r"(pairs[1])
               : "memory");
}
__device__ inline void stmatrix_trans(uint32_t address, const uint32_t (&pairs)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address),
               "r"(pairs[0])
               : "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
