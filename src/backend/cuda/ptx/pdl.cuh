// griddepcontrol: programmatic dependent launch (PDL), which lets a kernel start while its
// predecessor in the stream still runs. Below sm_90 the instruction does not exist, kernels are
// launched normally, and both functions do nothing. cuda/device/launch.cuh explains how the
// library's kernels use them.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

// griddepcontrol.launch_dependents: the next kernel may start once every cta of this one has
// executed this or has ended. It does not order memory.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: returns when all preceding kernels have ended and their writes are visible.
__device__ inline void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace nvfp4_moe::internal::cuda::ptx
