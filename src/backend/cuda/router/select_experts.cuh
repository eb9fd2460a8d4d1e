// Selects a token's experts in one warp, for the separate kernel (select_experts.cu) and for
// kernels that route.
//
// A lane has E / 32 neighbouring experts, at most 32, as keys in registers: unsigned integers in
// the order of the scores (core/router_score.h). Each of k rounds takes the largest key of the
// warp; ties go to the lowest lane, which has the lowest expert. Then lane i computes the weight of
// the i-th expert. Scores of all experts are computed only if a bias, pairs of a group or the
// softmax over all experts needs them; then lane i reads the logit of its expert again.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/small_batch.cuh"
#include "core/router_score.h"

namespace nvfp4_moe::internal::cuda {

using router::key_of;
using router::kNanKey;
using router::kRemovedKey;
using router::value_of;

NVFP4_MOE_HOST_DEVICE constexpr int element_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

// Reads from L2, as for ids (small_batch.cuh).
template <DType kType>
__device__ float load_logit_from_l2(const void* row, int i) {
  if constexpr (kType == DType::kF32) return __ldcg(static_cast<const float*>(row) + i);
  const unsigned short bits = __ldcg(static_cast<const unsigned short*>(row) + i);
  return kType == DType::kF16 ? __half2float(__ushort_as_half(bits)) : bf16_to_float(bits);
}

// Loads kCount logits from `first` on. vectors: the row is aligned for vector loads, up to 16
// bytes.
template <DType kType, int kCount>
__device__ void load_logits(const void* row, int first, int experts, bool vectors,
                            float (&x)[kCount]) {
  constexpr int kBytes = kCount * element_bytes(kType);
  if constexpr (kBytes > 4) {
    if (vectors && first + kCount <= experts) {
      uint32_t words[kBytes / 4];
      const auto* const from = static_cast<const uint8_t*>(row) + first * element_bytes(kType);
      if constexpr (kBytes == 8) {
        const uint2 vector = __ldcg(reinterpret_cast<const uint2*>(from));
        words[0] = vector.x, words[1] = vector.y;
      } else {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
          const uint4 vector = __ldcg(reinterpret_cast<const uint4*>(from) + i);
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
  for (int i = 0; i < kCount; ++i)
    x[i] = first + i < experts ? load_logit_from_l2<kType>(row, first + i) : 0.0f;
}

__device__ inline float load_logit(const void* row, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return load_element<DType::kF32>(row, i);
  return dtype == DType::kF16 ? load_element<DType::kF16>(row, i)
                              : load_element<DType::kBf16>(row, i);
}

__device__ inline int64_t load_index(const void* indices, DType dtype, int64_t i) {
  return dtype == DType::kI64 ? static_cast<const int64_t*>(indices)[i]
                              : static_cast<const int32_t*>(indices)[i];
}

// The lowest lane among those with the largest key.
__device__ inline int best_lane(uint32_t key, uint32_t& largest) {
  largest = __reduce_max_sync(kAllLanes, key);
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, key == largest))) - 1;
}

// A lane's state of its token after the experts are chosen.
struct Selected {
  int expert = -1;           // lane i: the i-th expert; -1 if there is none
  uint32_t key = 0;          // the key by which it was chosen
  bool nonfinite = false;    // a selection score is NaN
  double denominator = 0.0;  // of softmax over all experts
  float largest = 0.0f;      // the largest logit
};

template <int kPerLane>
struct LaneKeys {
  uint32_t keys[kPerLane];
  int first, experts;  // of this lane; of all lanes

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

  __device__ void softmax_denominator(Selected& selected) const {
    int position;
    selected.largest = value_of(__reduce_max_sync(kAllLanes, best(position)));
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (is_expert(i))
        sum += static_cast<double>(
            router::score_of(Scoring::kSoftmax, value_of(keys[i]), selected.largest));
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
    selected.denominator = sum;
  }

  // Converts logit keys to keys of the selection scores.
  __device__ void to_scores(Scoring scoring, const float* bias, const Selected& selected) {
    const double inverse = 1.0 / selected.denominator;  // only used for softmax
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!is_expert(i)) continue;
      float score = router::score_of(scoring, value_of(keys[i]), selected.largest);
      if (scoring == Scoring::kSoftmax)
        score = static_cast<float>(static_cast<double>(score) * inverse);
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
    const int winner = best_lane(largest, of_warp);
    if (how == GroupScore::kMax) return of_warp;
    const bool owns = static_cast<int>(threadIdx.x % 32) == winner;
    return key_of(value_of(of_warp) +
                  value_of(__reduce_max_sync(kAllLanes, owns ? second : largest)));
  }
  // Removes the experts of all groups except the best.
  __device__ void keep_groups(const RouterConfig& config) {
    const int lane = threadIdx.x % 32;
    const int groups = static_cast<int>(config.num_expert_group), size = experts / groups;
    uint32_t of_lane = kRemovedKey;  // key of group `lane`
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

  __device__ void take_best(int top_k, Selected& selected) {
    const int lane = threadIdx.x % 32;
    int position;
    uint32_t mine = best(position), largest;
    for (int k = 0; k < top_k; ++k) {
      const int winner = best_lane(mine, largest);
      const int taken = __shfl_sync(kAllLanes, first + position, winner);
      if (lane == k) selected.expert = taken, selected.key = largest;
      if (lane != winner) continue;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (i == position) keys[i] = kRemovedKey;
      mine = best(position);
    }
  }
};

template <int kPerLane>
__device__ Selected select(const SelectExperts& call, const void* row, bool vectors) {
  const RouterConfig& config = call.config;
  LaneKeys<kPerLane> lane;
  lane.first = static_cast<int>(threadIdx.x % 32) * kPerLane;
  lane.experts = static_cast<int>(config.num_experts);
  lane.load(row, call.logits_dtype, vectors);
  Selected selected;
  selected.nonfinite = lane.any_nan();
  const bool by_score = call.config.selects_by_score();
  if (config.scoring == Scoring::kSoftmax && (by_score || !config.renormalize))
    lane.softmax_denominator(selected);
  if (by_score) {
    lane.to_scores(config.scoring, call.correction_bias, selected);
    selected.nonfinite = selected.nonfinite || lane.any_nan();
  }
  if (config.topk_group < config.num_expert_group) lane.keep_groups(config);
  lane.take_best(static_cast<int>(config.top_k), selected);
  return selected;
}

__device__ inline Selected look_up(const SelectExperts& call, int64_t t) {
  const int lane = threadIdx.x % 32;
  const int64_t token = load_index(call.token_ids, call.token_ids_dtype, t);
  const bool known = token >= 0 && token < call.vocab_size, wanted = lane < call.config.top_k;
  Selected selected;
  if (known && wanted) {
    const int64_t expert =
        load_index(call.hash_table, call.hash_table_dtype, token * call.config.top_k + lane);
    if (expert >= 0 && expert < call.config.num_experts) selected.expert = static_cast<int>(expert);
  }
  const unsigned bad = __ballot_sync(kAllLanes, known ? wanted && selected.expert < 0 : lane == 0);
  if (lane == 0 && bad != 0 && call.bad_ids != nullptr)
    atomicAdd(reinterpret_cast<unsigned long long*>(call.bad_ids),
              static_cast<unsigned long long>(__popc(bad)));
  return selected;
}

// kByLogits: experts were chosen by the keys of their logits.
template <bool kByLogits>
__device__ float router_weight(const SelectExperts& call, const void* row,
                               const Selected& selected) {
  const RouterConfig& config = call.config;
  const bool chosen = selected.expert >= 0;
  float x = 0.0f;
  if (chosen)
    x = kByLogits ? value_of(selected.key) : load_logit(row, call.logits_dtype, selected.expert);
  const float of_chosen = value_of(__reduce_max_sync(kAllLanes, chosen ? key_of(x) : kRemovedKey));
  const float largest = config.renormalize ? of_chosen : selected.largest;
  const float score = chosen ? router::score_of(config.scoring, x, largest) : 0.0f;
  double divisor = selected.denominator;
  if (config.renormalize) {
    divisor = 0.0;
    for (int k = 0; k < static_cast<int>(config.top_k); ++k)
      divisor += static_cast<double>(__shfl_sync(kAllLanes, score, k));
    divisor += static_cast<double>(config.renormalize_epsilon);
  }
  const bool divide = config.renormalize || config.scoring == Scoring::kSoftmax;
  if (!chosen) return 0.0f;
  double factor = static_cast<double>(config.routed_scaling_factor);
  if (call.expert_scale != nullptr)
    factor *= static_cast<double>(call.expert_scale[selected.expert]);
  return router::weight_of(score, divide, divisor, factor, selected.nonfinite);
}

// The row of a token's logits.
__device__ inline const uint8_t* logits_row(const SelectExperts& call, int64_t token) {
  return static_cast<const uint8_t*>(call.logits) +
         token * call.logits_stride * element_bytes(call.logits_dtype);
}
// Whether lanes of kPerLane experts may read the rows of logits by vectors.
inline bool reads_vectors(const SelectExperts& call, int per_lane) {
  const int64_t element = element_bytes(call.logits_dtype);
  const int64_t vector_bytes = per_lane * element < 16 ? per_lane * element : 16;
  return vector_bytes > 4 &&
         reinterpret_cast<uintptr_t>(call.logits) % static_cast<uintptr_t>(vector_bytes) == 0 &&
         call.logits_stride * element % vector_bytes == 0;
}

// Writes a token's experts and weights to the call's arrays. Called by one warp. kPerLane 0:
// experts come from the table.
template <int kPerLane>
__device__ void select_token(const SelectExperts& call, int64_t token, bool vectors) {
  const int lane = threadIdx.x % 32;
  const uint8_t* const row = logits_row(call, token);
  Selected selected;
  if constexpr (kPerLane == 0)
    selected = look_up(call, token);
  else
    selected = select<kPerLane>(call, row, vectors);
#if __CUDA_ARCH__ < 1200
  const bool by_logits = kPerLane > 0 && !call.config.selects_by_score();
#else  // with both variants ptxas 13.0 would use the stack, so logits are read again
  const bool by_logits = false;
#endif
  const float weight = by_logits ? router_weight<true>(call, row, selected)
                                 : router_weight<false>(call, row, selected);
  if (lane >= call.config.top_k) return;
  const int64_t i = token * call.config.top_k + lane;
  if (call.ids_dtype == DType::kI64)
    static_cast<int64_t*>(call.topk_ids)[i] = selected.expert;
  else
    static_cast<int32_t*>(call.topk_ids)[i] = selected.expert;
  call.topk_weights[i] = weight;
}

}  // namespace nvfp4_moe::internal::cuda
