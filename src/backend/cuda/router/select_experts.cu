// A router's selection: logits (T, E) -> topk_ids (T, k) and topk_weights (T, k), in one kernel
// with one warp per token.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/router/router.h"
#include "backend/cuda/router/select_experts.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kSelectWarps = 4;

template <int kPerLane>
__global__ void __launch_bounds__(32 * kSelectWarps)
    select_experts_kernel(const SelectExperts call, bool vectors) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: later kernels may rely on what preceded this kernel
  const int64_t token = int64_t{blockIdx.x} * kSelectWarps + threadIdx.x / 32;
  if (token < call.tokens) select_token<kPerLane>(call, token, vectors);
}

template <int kPerLane>
Status launch_select_experts(const SelectExperts& call, void* stream) {
  const auto ctas = static_cast<unsigned>((call.tokens + kSelectWarps - 1) / kSelectWarps);
  return launch<select_experts_kernel<kPerLane>>("select_experts", ctas, 32 * kSelectWarps, 0,
                                                 stream, call, reads_vectors(call, kPerLane));
}

}  // namespace

Status select_experts(int device, const SelectExperts& call, void* stream) {
  constexpr int64_t kMostTokens =
      ((int64_t{1} << 31) - 1) * kSelectWarps;  // limit of a grid along x
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
