// griddepcontrol: programmatic dependent launch (PDL), by which a kernel starts while the one
// before it in the stream still runs. Below sm_90 there is no such instruction, kernels are
// launched in the ordinary way, and both functions do nothing. cuda/device/launch.cuh says how the
// library's kernels use them.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

// griddepcontrol.launch_dependents: the next kernel may start once every cta of this one has
// executed this or has ended. It says nothing of memory.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: returns once all kernels before this one have ended and what they wrote is
// visible.
__device__ inline void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace nvfp4_moe::internal::cuda::ptx
