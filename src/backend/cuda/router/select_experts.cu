// A router's selection: logits (T, E) -> topk_ids (T, k) and topk_weights (T, k), in one kernel
// with one cta per token.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/router/router.h"
#include "backend/cuda/router/select_experts.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

// Few tokens: a thread for each expert. With more of them their number counts and not the latency
// of one, and threads score several experts each.
constexpr int64_t kAllThreads = 65536;

template <int kPerLane>
constexpr int kMostThreads = std::clamp(32 * kPerLane, 32, 512);

template <int kPerLane>
__global__ void __launch_bounds__(kMostThreads<kPerLane>, 1)
    select_experts_kernel(const __grid_constant__ SelectExperts call) {
  // The parameters come from memory too, so they are read while the preceding kernel runs.
  uint32_t read = 0;
#pragma unroll
  for (size_t i = 0; i < sizeof(call) / 4; i += 16)
    read |= reinterpret_cast<const uint32_t*>(&call)[i];
  ptx::pin(read);
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: later kernels may rely on what preceded this kernel
  select_token<kPerLane>(call, blockIdx.x);
}

template <int kPerLane>
Status launch_select_experts(const SelectExperts& call, void* stream) {
  const int64_t threads =
      std::clamp<int64_t>(kAllThreads / call.tokens / 32 * 32, 32, kMostThreads<kPerLane>);
  return launch<select_experts_kernel<kPerLane>>("select_experts",
                                                 static_cast<unsigned>(call.tokens),
                                                 static_cast<unsigned>(threads), 0, stream, call);
}

}  // namespace

Status select_experts(int device, const SelectExperts& call, void* stream) {
  constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;  // limit of a grid along x
  if (call.tokens == 0) return {};
  if (call.tokens > kMostTokens)
    return invalid_argument("tokens: expected at most " + std::to_string(kMostTokens) + ", got " +
                            std::to_string(call.tokens));
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  switch (call.config.hash_routing ? 0 : router::experts_a_lane(call.config.num_experts)) {
    case 0: return launch_select_experts<0>(call, stream);
    case 1: return launch_select_experts<1>(call, stream);
    case 2: return launch_select_experts<2>(call, stream);
    case 4: return launch_select_experts<4>(call, stream);
    case 8: return launch_select_experts<8>(call, stream);
    case 16: return launch_select_experts<16>(call, stream);
    default: return launch_select_experts<32>(call, stream);
  }
}

}  // namespace nvfp4_moe::internal::cuda
