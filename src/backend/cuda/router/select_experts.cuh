// Selects a token's experts in one cta, with a thread for each expert if tokens are few.
//
// At a decode step this is latency: few tokens, and a chain of dependent instructions that no
// multiprocessor has in its cache. So there are no rounds of "take the best, remove it":
//
//   1. The threads compute a key for each expert: an unsigned integer in the order of the scores
//      (core/router_score.h).
//   2. A lane of the first warp has kPerLane neighbouring experts, and the lanes are ranked by
//      their best keys, ties by lane. The k-th of these keys bounds the result from below. So the
//      candidates are the keys that reach it, in the lanes that rank among the first k.
//   3. The rank of a candidate is the number of candidates before it, ties by expert. The k first
//      ones are the result.
//
// Scores of all experts are computed only if a bias, pairs of a group or the softmax over all
// experts needs them.
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

__device__ inline float load_logit(const void* row, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return load_element<DType::kF32>(row, i);
  return dtype == DType::kF16 ? load_element<DType::kF16>(row, i)
                              : load_element<DType::kBf16>(row, i);
}

__device__ inline int64_t load_index(const void* indices, DType dtype, int64_t i) {
  return dtype == DType::kI64 ? static_cast<const int64_t*>(indices)[i]
                              : static_cast<const int32_t*>(indices)[i];
}

// The number of keys in shared memory that come before the lane's one: larger, or equal and of a
// lower lane. keys: (32), aligned to 16 bytes, with those of all lanes.
__device__ inline int rank_among(const uint32_t* keys) {
  const int lane = threadIdx.x % 32;
  const uint32_t mine = keys[lane];
  int ranks[4] = {};  // several, because a sum is a chain of dependent instructions
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 its = reinterpret_cast<const uint4*>(keys)[i];
    ranks[0] += its.x > mine || (its.x == mine && 4 * i < lane);
    ranks[1] += its.y > mine || (its.y == mine && 4 * i + 1 < lane);
    ranks[2] += its.z > mine || (its.z == mine && 4 * i + 2 < lane);
    ranks[3] += its.w > mine || (its.w == mine && 4 * i + 3 < lane);
  }
  return ranks[0] + ranks[1] + (ranks[2] + ranks[3]);
}

// A candidate: unique, and larger if it comes earlier.
__device__ inline uint64_t candidate_of(uint32_t key, int expert) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(~expert);
}

// The threads of a cta share this about their token. kPerLane: router::experts_a_lane(experts).
template <int kPerLane>
struct SharedSelection {
  static constexpr int kExperts = 32 * kPerLane;  // at least as many as there are
  static constexpr int kPadding = 8;              // of the candidates

  alignas(16) uint32_t keys[kExperts];       // by expert; kRemovedKey beyond the last one
  alignas(16) uint32_t best_keys[32];        // of groups, then of lanes
  uint64_t candidates[kExperts + kPadding];  // in any order
  uint64_t chosen[kMaxRouterTopK];           // candidates, in order
  float numerators[kExperts];                // of the softmax over all experts
  // By expert. Under softmax logits, else scores without bias, for the weights. Written only if
  // experts are chosen by their scores.
  float values[kExperts];
  double denominator;  // of the softmax over all experts
  uint32_t largest;    // the largest logit key, for the same
  int nan;             // a key is NaN
};

// The i-th expert, known to lane i of the first warp.
struct Selected {
  int expert = -1;           // -1 without one
  float x = 0.0f;            // its logit, or its score if is_score is set
  bool is_score = false;     // the same in all lanes
  bool nonfinite = false;    // a selection score is NaN
  double denominator = 0.0;  // of the softmax over all experts
  float largest = 0.0f;      // the largest logit, for the same
};

// Computes the softmax over all experts, from keys of logits: their largest, and the sum of the
// numerators, which the first warp adds up as core/router.cpp does.
template <int kPerLane>
__device__ void softmax_over_all(int experts, SharedSelection<kPerLane>& shared) {
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  uint32_t mine = kRemovedKey;
  for (int e = thread; e < experts; e += threads) mine = max(mine, shared.keys[e]);
  mine = __reduce_max_sync(kAllLanes, mine);
  if (thread % 32 == 0) atomicMax(&shared.largest, mine);
  __syncthreads();
  const float largest = value_of(shared.largest);
  for (int e = thread; e < experts; e += threads)
    shared.numerators[e] = router::score_of(Scoring::kSoftmax, value_of(shared.keys[e]), largest);
  __syncthreads();
  if (thread < 32) {
    const int end = min((thread + 1) * kPerLane, experts);
    double sum = 0.0;
#pragma unroll 4
    for (int e = thread * kPerLane; e < end; ++e) sum += static_cast<double>(shared.numerators[e]);
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
    if (thread == 0) shared.denominator = sum;
  }
  __syncthreads();
}

// Converts keys of logits to keys of the selection scores.
template <int kPerLane>
__device__ void score_all(const SelectExperts& call, SharedSelection<kPerLane>& shared) {
  const auto experts = static_cast<int>(call.config.num_experts);
  const bool softmax = call.config.scoring == Scoring::kSoftmax;
  const double inverse = softmax ? 1.0 / shared.denominator : 0.0;
#pragma unroll 1
  for (auto e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    const float logit = value_of(shared.keys[e]);
    const float score =
        softmax ? static_cast<float>(static_cast<double>(shared.numerators[e]) * inverse)
                : router::score_of(call.config.scoring, logit, 0.0f);
    shared.values[e] = softmax ? logit : score;
    const uint32_t key =
        key_of(call.correction_bias != nullptr ? score + call.correction_bias[e] : score);
    shared.keys[e] = key;
    if (key == kNanKey) shared.nan = 1;
  }
  __syncthreads();
}

// Removes the experts of all groups except the best.
template <int kPerLane>
__device__ void keep_groups(const RouterConfig& config, SharedSelection<kPerLane>& shared) {
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, experts = static_cast<int>(config.num_experts);
  const int groups = static_cast<int>(config.num_expert_group), size = experts / groups;
#pragma unroll 1
  for (int g = thread / 32; g < groups; g += threads / 32) {
    uint32_t largest = kRemovedKey, second = kRemovedKey;
    for (int i = lane; i < size; i += 32) {
      const uint32_t key = shared.keys[g * size + i];
      second = max(second, min(key, largest));
      largest = max(largest, key);
    }
    uint32_t key = __reduce_max_sync(kAllLanes, largest);
    if (config.group_score == GroupScore::kTop2Sum) {
      const bool owns =
          lane == __ffs(static_cast<int>(__ballot_sync(kAllLanes, key == largest))) - 1;
      key = key_of(value_of(key) + value_of(__reduce_max_sync(kAllLanes, owns ? second : largest)));
    }
    if (lane == 0) shared.best_keys[g] = key;
  }
  if (thread >= groups && thread < 32) shared.best_keys[thread] = kRemovedKey;
  __syncthreads();
  const int rank = rank_among(shared.best_keys);
  const uint32_t kept = __ballot_sync(kAllLanes, lane < groups && rank < config.topk_group);
#pragma unroll 1
  for (int g = thread / 32; g < groups; g += threads / 32)
    if ((kept >> g & 1u) == 0)
      for (int i = lane; i < size; i += 32) shared.keys[g * size + i] = kRemovedKey;
  __syncthreads();
}

// Puts the best experts in order. Called by the first warp.
template <int kPerLane>
__device__ void take_best(int top_k, SharedSelection<kPerLane>& shared) {
  constexpr int kAtOnce = SharedSelection<kPerLane>::kPadding;
  const int lane = static_cast<int>(threadIdx.x), first = lane * kPerLane;
  uint32_t keys[kPerLane], best = kRemovedKey;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) best = max(best, keys[i] = shared.keys[first + i]);
  shared.best_keys[lane] = best;
  __syncwarp();
  const int rank = rank_among(shared.best_keys);
  const int last = __ffs(static_cast<int>(__ballot_sync(kAllLanes, rank == top_k - 1))) - 1;
  const uint32_t least = max(__shfl_sync(kAllLanes, best, last), kRemovedKey + 1);
  uint32_t own = 0;  // bit mask of the lane's candidates
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) own |= static_cast<uint32_t>(keys[i] >= least) << i;
  if (rank >= top_k) own = 0;
  int count = 0;
  // Most lanes have one candidate at most.
  for (uint32_t lanes; (lanes = __ballot_sync(kAllLanes, own != 0)) != 0; count += __popc(lanes)) {
    if (own == 0) continue;
    const int expert = first + __ffs(static_cast<int>(own)) - 1;
    own &= own - 1;
    shared.candidates[count + __popc(lanes & ((1u << lane) - 1))] =
        candidate_of(shared.keys[expert], expert);
  }
  if (lane < kAtOnce) shared.candidates[count + lane] = 0;
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < count; i += 32) {
    const uint64_t mine = shared.candidates[i];
    int before[2] = {};
#pragma unroll 1
    for (int other = 0; other < count; other += kAtOnce)
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) before[j % 2] += shared.candidates[other + j] > mine;
    if (before[0] + before[1] < top_k) shared.chosen[before[0] + before[1]] = mine;
  }
  __syncwarp();
}

// row: a token's logits (E). Called by all threads; the result is the first warp's.
template <int kPerLane>
__device__ Selected select(const SelectExperts& call, const void* row,
                           SharedSelection<kPerLane>& shared) {
  const RouterConfig& config = call.config;
  const auto thread = static_cast<int>(threadIdx.x), experts = static_cast<int>(config.num_experts);
  if (thread == 0) shared.largest = kRemovedKey, shared.nan = 0;
  __syncthreads();
#pragma unroll 1
  for (int e = thread; e < shared.kExperts; e += static_cast<int>(blockDim.x)) {
    const uint32_t key = e < experts ? key_of(load_logit(row, call.logits_dtype, e)) : kRemovedKey;
    shared.keys[e] = key;
    if (key == kNanKey) shared.nan = 1;
  }
  __syncthreads();
  const bool by_score = config.selects_by_score(), softmax = config.scoring == Scoring::kSoftmax;
  const bool over_all = softmax && (by_score || !config.renormalize);
  if (over_all) softmax_over_all(experts, shared);
  if (by_score) score_all(call, shared);
  if (config.topk_group < config.num_expert_group) keep_groups(config, shared);
  Selected selected;
  if (thread >= 32) return selected;
  take_best(static_cast<int>(config.top_k), shared);
  if (over_all)
    selected.denominator = shared.denominator, selected.largest = value_of(shared.largest);
  selected.nonfinite = shared.nan != 0;
  selected.is_score = by_score && !softmax;
  if (thread < config.top_k) {
    const uint64_t chosen = shared.chosen[thread];
    selected.expert = static_cast<int>(~static_cast<uint32_t>(chosen));
    selected.x =
        by_score ? shared.values[selected.expert] : value_of(static_cast<uint32_t>(chosen >> 32));
  }
  return selected;
}

// row: a token's logits (E). Called by one warp.
__device__ inline Selected look_up(const SelectExperts& call, const void* row, int64_t t) {
  const int lane = threadIdx.x % 32;
  const int64_t token = load_index(call.token_ids, call.token_ids_dtype, t);
  const bool known = token >= 0 && token < call.vocab_size, wanted = lane < call.config.top_k;
  Selected selected;
  if (known && wanted) {
    const int64_t expert =
        load_index(call.hash_table, call.hash_table_dtype, token * call.config.top_k + lane);
    if (expert >= 0 && expert < call.config.num_experts) {
      selected.expert = static_cast<int>(expert);
      selected.x = load_logit(row, call.logits_dtype, expert);
    }
  }
  const unsigned bad = __ballot_sync(kAllLanes, known ? wanted && selected.expert < 0 : lane == 0);
  if (lane == 0 && bad != 0 && call.bad_ids != nullptr)
    atomicAdd(reinterpret_cast<unsigned long long*>(call.bad_ids),
              static_cast<unsigned long long>(__popc(bad)));
  return selected;
}

// Called by the first warp.
__device__ inline float router_weight(const SelectExperts& call, const Selected& selected) {
  const RouterConfig& config = call.config;
  const bool chosen = selected.expert >= 0;
  float score = chosen ? selected.x : 0.0f;
  if (!selected.is_score) {
    const uint32_t key = chosen ? key_of(selected.x) : kRemovedKey;
    const float of_chosen = value_of(__reduce_max_sync(kAllLanes, key));
    const float largest = config.renormalize ? of_chosen : selected.largest;
    if (chosen) score = router::score_of(config.scoring, selected.x, largest);
  }
  double divisor = selected.denominator;
  if (config.renormalize) {
    divisor = 0.0;
    const auto addend = static_cast<double>(score);
#pragma unroll 4
    for (int k = 0; k < static_cast<int>(config.top_k); ++k)
      divisor += __shfl_sync(kAllLanes, addend, k);
    divisor += static_cast<double>(config.renormalize_epsilon);
  }
  const bool divide = config.renormalize || config.scoring == Scoring::kSoftmax;
  if (!chosen) return 0.0f;
  double factor = static_cast<double>(config.routed_scaling_factor);
  if (call.expert_scale != nullptr)
    factor *= static_cast<double>(call.expert_scale[selected.expert]);
  return router::weight_of(score, divide, divisor, factor, selected.nonfinite);
}

// The row of a token's logits (E).
__device__ inline const uint8_t* logits_row(const SelectExperts& call, int64_t token) {
  return static_cast<const uint8_t*>(call.logits) +
         token * call.logits_stride * element_bytes(call.logits_dtype);
}

// Writes a token's experts and weights to the call's arrays. Called by all threads of a cta.
// kPerLane 0: experts come from the table.
template <int kPerLane>
__device__ void select_token(const SelectExperts& call, int64_t token) {
  const uint8_t* const row = logits_row(call, token);
  Selected selected;
  if constexpr (kPerLane == 0) {
    selected = look_up(call, row, token);
  } else {
    __shared__ SharedSelection<kPerLane> shared;
    selected = select(call, row, shared);
  }
  if (threadIdx.x >= 32) return;
  const float weight = router_weight(call, selected);
  const auto lane = static_cast<int>(threadIdx.x);
  if (lane >= call.config.top_k) return;
  const int64_t i = token * call.config.top_k + lane;
  if (call.ids_dtype == DType::kI64)
    static_cast<int64_t*>(call.topk_ids)[i] = selected.expert;
  else
    static_cast<int32_t*>(call.topk_ids)[i] = selected.expert;
  call.topk_weights[i] = weight;
}

}  // namespace nvfp4_moe::internal::cuda
