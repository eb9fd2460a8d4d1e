// A router's selection: logits (T, E) -> topk_ids (T, k) and topk_weights (T, k), in one kernel.
//
// A warp takes a token, and a lane E / 32 neighbouring experts, at most 32, as keys in registers: unsigned integers that
// order as the scores do (core/router_score.h). Each of k rounds takes the largest key of the warp, and of equal ones
// that of the lowest lane, which is the lowest expert; then lane i weighs the i-th expert. Scores of all experts are
// formed only where a bias, pairs of a group or the softmax of all experts ask for them, and then lane i reads the logit
// of its expert again.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/select_experts.h"
#include "core/router_score.h"

namespace nvfp4_moe::cuda {
namespace {

using router::key_of;
using router::kNanKey;
using router::kRemovedKey;
using router::value_of;

constexpr int kWarps = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

NVFP4_MOE_HOST_DEVICE constexpr int element_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// kCount logits from `first` on. vectors: the row is aligned to what they take, up to 16 bytes.
template <DType kType, int kCount>
__device__ void load_logits(const void* row, int first, int experts, bool vectors, float (&x)[kCount]) {
  constexpr int kBytes = kCount * element_bytes(kType);
  if constexpr (kBytes > 4) {
    if (vectors && first + kCount <= experts) {
      uint32_t words[kBytes / 4];
      const auto* const from = static_cast<const uint8_t*>(row) + first * element_bytes(kType);
      if constexpr (kBytes == 8) {
        const uint2 vector = *reinterpret_cast<const uint2*>(from);
        words[0] = vector.x, words[1] = vector.y;
      } else {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
          const uint4 vector = reinterpret_cast<const uint4*>(from)[i];
          words[4 * i] = vector.x, words[4 * i + 1] = vector.y;
          words[4 * i + 2] = vector.z, words[4 * i + 3] = vector.w;
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kType == DType::kF32) {
          x[i] = __uint_as_float(words[i]);
        } else {
          const auto bits = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
          x[i] = kType == DType::kF16 ? __half2float(__ushort_as_half(bits)) : bf16_to_float(bits);
        }
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = first + i < experts ? load_element<kType>(row, first + i) : 0.0f;
}

__device__ float load_logit(const void* row, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return load_element<DType::kF32>(row, i);
  return dtype == DType::kF16 ? load_element<DType::kF16>(row, i) : load_element<DType::kBf16>(row, i);
}

__device__ int64_t load_index(const void* indices, DType dtype, int64_t i) {
  return dtype == DType::kI64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

// The lowest lane of those with the largest key.
__device__ int best_lane(uint32_t key, uint32_t& largest) {
  largest = __reduce_max_sync(kAllLanes, key);
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, key == largest))) - 1;
}

// What a lane knows of its token once the experts are chosen.
struct Selection {
  int expert = -1;           // lane i: the i-th; -1 where there is none
  uint32_t key = 0;          // the one that it was chosen by
  bool nonfinite = false;    // a selection score is NaN
  double denominator = 0.0;  // of softmax over all experts
  float largest = 0.0f;      // the largest logit
};

template <int kPerLane>
struct LaneKeys {
  uint32_t keys[kPerLane];
  int first, experts;  // of this lane, of all

  __device__ bool is_expert(int i) const { return first + i < experts; }

  __device__ void load(const void* row, DType dtype, bool vectors) {
    float x[kPerLane];
    if (dtype == DType::kF32)
      load_logits<DType::kF32>(row, first, experts, vectors, x);
    else if (dtype == DType::kF16)
      load_logits<DType::kF16>(row, first, experts, vectors, x);
    else
      load_logits<DType::kBf16>(row, first, experts, vectors, x);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = is_expert(i) ? key_of(x[i]) : kRemovedKey;
  }
  __device__ bool any_nan() const {
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) nan = nan || keys[i] == kNanKey;
    return __any_sync(kAllLanes, nan);
  }
  // The largest key of the lane, and the first position that has it.
  __device__ uint32_t best(int& position) const {
    uint32_t largest = keys[0];
    position = 0;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i)
      if (keys[i] > largest) {
        largest = keys[i];
        position = i;
      }
    return largest;
  }

  __device__ void softmax_denominator(Selection& selection) const {
    int position;
    selection.largest = value_of(__reduce_max_sync(kAllLanes, best(position)));
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (is_expert(i))
        sum += static_cast<double>(router::score_of(Scoring::kSoftmax, value_of(keys[i]), selection.largest));
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
    selection.denominator = sum;
  }

  // Logit keys to those of the selection scores.
  __device__ void to_scores(Scoring scoring, const float* bias, const Selection& selection) {
    const double inverse = 1.0 / selection.denominator;  // softmax alone reads it
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!is_expert(i)) continue;
      float score = router::score_of(scoring, value_of(keys[i]), selection.largest);
      if (scoring == Scoring::kSoftmax) score = static_cast<float>(static_cast<double>(score) * inverse);
      if (bias != nullptr) score = score + bias[first + i];
      keys[i] = key_of(score);
    }
  }

  // The key of the group of experts [low, high).
  __device__ uint32_t group_key(GroupScore how, int low, int high) const {
    uint32_t largest = kRemovedKey, second = kRemovedKey;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t key = first + i >= low && first + i < high ? keys[i] : kRemovedKey;
      second = max(second, min(key, largest));
      largest = max(largest, key);
    }
    uint32_t of_warp;
    const int owner = best_lane(largest, of_warp);
    if (how == GroupScore::kMax) return of_warp;
    const bool owns = static_cast<int>(threadIdx.x % 32) == owner;
    return key_of(value_of(of_warp) + value_of(__reduce_max_sync(kAllLanes, owns ? second : largest)));
  }
  // Removes the experts of all groups but the best.
  __device__ void keep_groups(const RouterConfig& config) {
    const int lane = threadIdx.x % 32;
    const int groups = static_cast<int>(config.num_expert_group), size = experts / groups;
    uint32_t of_lane = kRemovedKey;  // of group `lane`
    for (int g = 0; g < groups; ++g) {
      const uint32_t key = group_key(config.group_score, g * size, (g + 1) * size);
      if (lane == g) of_lane = key;
    }
    uint32_t kept = 0, largest;
    for (int i = 0; i < static_cast<int>(config.topk_group); ++i) {
      const int group = best_lane(of_lane, largest);
      kept |= 1u << group;
      if (lane == group) of_lane = kRemovedKey;
    }
    int group = first / size, end = (group + 1) * size;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (first + i >= end) {
        ++group;
        end += size;
      }
      if ((kept >> min(group, 31) & 1u) == 0) keys[i] = kRemovedKey;
    }
  }

  __device__ void take_best(int top_k, Selection& selection) {
    const int lane = threadIdx.x % 32;
    int position;
    uint32_t mine = best(position), largest;
    for (int k = 0; k < top_k; ++k) {
      const int owner = best_lane(mine, largest);
      const int taken = __shfl_sync(kAllLanes, first + position, owner);
      if (lane == k) selection.expert = taken, selection.key = largest;
      if (lane != owner) continue;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (i == position) keys[i] = kRemovedKey;
      mine = best(position);
    }
  }
};

template <int kPerLane>
__device__ Selection select(const SelectExperts& call, const void* row, bool vectors) {
  const RouterConfig& config = call.config;
  LaneKeys<kPerLane> lane;
  lane.first = static_cast<int>(threadIdx.x % 32) * kPerLane;
  lane.experts = static_cast<int>(config.num_experts);
  lane.load(row, call.logits_dtype, vectors);
  Selection selection;
  selection.nonfinite = lane.any_nan();
  const bool by_score = call.config.selects_by_score();
  if (config.scoring == Scoring::kSoftmax && (by_score || !config.renormalize)) lane.softmax_denominator(selection);
  if (by_score) {
    lane.to_scores(config.scoring, call.correction_bias, selection);
    selection.nonfinite = selection.nonfinite || lane.any_nan();
  }
  if (config.topk_group < config.num_expert_group) lane.keep_groups(config);
  lane.take_best(static_cast<int>(config.top_k), selection);
  return selection;
}

__device__ Selection look_up(const SelectExperts& call, int64_t t) {
  const int lane = threadIdx.x % 32;
  const int64_t token = load_index(call.token_ids, call.token_ids_dtype, t);
  const bool known = token >= 0 && token < call.vocab_size, wanted = lane < call.config.top_k;
  Selection selection;
  if (known && wanted) {
    const int64_t expert = load_index(call.hash_table, call.hash_table_dtype, token * call.config.top_k + lane);
    if (expert >= 0 && expert < call.config.num_experts) selection.expert = static_cast<int>(expert);
  }
  const unsigned bad = __ballot_sync(kAllLanes, known ? wanted && selection.expert < 0 : lane == 0);
  if (lane == 0 && bad != 0 && call.bad_ids != nullptr)
    atomicAdd(reinterpret_cast<unsigned long long*>(call.bad_ids), static_cast<unsigned long long>(__popc(bad)));
  return selection;
}

// kByLogits: what the experts were chosen by are their logits' keys.
template <bool kByLogits>
__device__ float weigh(const SelectExperts& call, const void* row, const Selection& selection) {
  const RouterConfig& config = call.config;
  const bool chosen = selection.expert >= 0;
  float x = 0.0f;
  if (chosen) x = kByLogits ? value_of(selection.key) : load_logit(row, call.logits_dtype, selection.expert);
  const float of_chosen = value_of(__reduce_max_sync(kAllLanes, chosen ? key_of(x) : kRemovedKey));
  const float largest = config.renormalize ? of_chosen : selection.largest;
  const float score = chosen ? router::score_of(config.scoring, x, largest) : 0.0f;
  double divisor = selection.denominator;
  if (config.renormalize) {
    divisor = 0.0;
    for (int k = 0; k < static_cast<int>(config.top_k); ++k)
      divisor += static_cast<double>(__shfl_sync(kAllLanes, score, k));
    divisor += static_cast<double>(config.renormalize_epsilon);
  }
  const bool divide = config.renormalize || config.scoring == Scoring::kSoftmax;
  if (!chosen) return 0.0f;
  return router::weight_of(score, divide, divisor, config.routed_scaling_factor, selection.nonfinite);
}

// kPerLane 0: experts come from the table.
template <int kPerLane>
__global__ void __launch_bounds__(32 * kWarps) select_experts_kernel(const SelectExperts call, bool vectors) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not before: what follows may rely on what was there before this kernel
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (t >= call.tokens) return;
  const int lane = threadIdx.x % 32;
  const auto* const row =
      static_cast<const uint8_t*>(call.logits) + t * call.logits_stride * element_bytes(call.logits_dtype);
  Selection selection;
  if constexpr (kPerLane == 0)
    selection = look_up(call, t);
  else
    selection = select<kPerLane>(call, row, vectors);
#if __CUDA_ARCH__ < 1200
  const bool by_logits = kPerLane > 0 && !call.config.selects_by_score();
#else  // for both ways ptxas 13.0 takes room on the stack: logits are read again there
  const bool by_logits = false;
#endif
  const float weight = by_logits ? weigh<true>(call, row, selection) : weigh<false>(call, row, selection);
  if (lane >= call.config.top_k) return;
  const int64_t i = t * call.config.top_k + lane;
  if (call.ids_dtype == DType::kI64)
    static_cast<int64_t*>(call.topk_ids)[i] = selection.expert;
  else
    static_cast<int32_t*>(call.topk_ids)[i] = selection.expert;
  call.topk_weights[i] = weight;
}

template <int kPerLane>
Status launch_select_experts(const SelectExperts& call, void* stream) {
  const int64_t element = element_bytes(call.logits_dtype);
  const int64_t vector_bytes = kPerLane * element < 16 ? kPerLane * element : 16;
  const bool vectors = vector_bytes > 4 && reinterpret_cast<uintptr_t>(call.logits) % vector_bytes == 0 &&
                       call.logits_stride * element % vector_bytes == 0;
  const auto ctas = static_cast<unsigned>((call.tokens + kWarps - 1) / kWarps);
  return launch<select_experts_kernel<kPerLane>>("select_experts", ctas, 32 * kWarps, 0, stream, call, vectors);
}

Status select_experts_on_device(int device, const SelectExperts& call, void* queue) {
  constexpr int64_t kMostTokens = ((int64_t{1} << 31) - 1) * kWarps;  // of a grid along x
  if (call.tokens == 0) return {};
  if (call.tokens > kMostTokens)
    return invalid_argument("tokens: expected at most " + std::to_string(kMostTokens) + ", got " +
                            std::to_string(call.tokens));
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  switch (call.config.hash_routing ? 0 : router::experts_a_lane(call.config.num_experts)) {
    case 0: return launch_select_experts<0>(call, queue);
    case 1: return launch_select_experts<1>(call, queue);
    case 2: return launch_select_experts<2>(call, queue);
    case 4: return launch_select_experts<4>(call, queue);
    case 8: return launch_select_experts<8>(call, queue);
    case 16: return launch_select_experts<16>(call, queue);
    default: return launch_select_experts<32>(call, queue);
  }
}

}  // namespace

constinit const DeviceRouter kRouter = {select_experts_on_device};

}  // namespace nvfp4_moe::cuda
