// setmaxnreg: moves registers between the warpgroups of a cta. All warps of a warpgroup execute it.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

// setmaxnreg.inc: waits until the cta's pool has the registers.
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// setmaxnreg.dec: returns registers above kRegisters to the pool.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace nvfp4_moe::internal::cuda::ptx
