// The batch of a layer in one launch (decode.cuh): the kernel's arguments, the routing, which each
// cta computes for itself, and hidden in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/gemm/biases.cuh"
#include "backend/cuda/gemm/gated_activation.cuh"
#include "backend/cuda/gemm/scheduler.h"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/small_batch.cuh"
#include "backend/sm90/decode.h"
#include "backend/sm90/decode_runs.h"
#include "backend/sm90/dequantize.cuh"
#include "backend/sm90/epilogue.cuh"

namespace nvfp4_moe::internal::sm90 {

// The routed experts, or the shared expert.
struct DecodePart {
  const uint8_t* weights;  // expert 0's tiles
  int64_t expert_stride;   // bytes
  int64_t down_offset;     // bytes from an expert's first tile to its first one of down
  int32_t groups;          // groups of 16 weight rows of gate/up, per expert; 0: no such part
  int32_t down_k_tiles;
  int32_t channels;   // I
  int32_t row_elems;  // elements of an intermediate row in global memory: I, rounded up to 32
  // intermediate, (T top_k, row_elems), or (T, row_elems) of the shared expert; each row is in the
  // order of B fragments
  uint16_t* rows;
  const TensorScales* tensor_scales;  // (E)
  cuda::BiasTable gemm1_biases, down_biases;
};
struct DecodeArgs {
  DecodePart routed, shared;
  cuda::AssignmentIds ids;
  const void* hidden;  // (T, H)
  DType hidden_dtype;
  const float* topk_weights;    // (T, top_k)
  const float* shared_weights;  // (T), or null: 1
  void* out;                    // (T, H)
  DType out_dtype;
  int32_t tokens, top_k, hidden_size, k_tiles;
  // fp8: log2 of the number of warps that share a row of subtiles along K (decode_fp8.cuh)
  int32_t gate_up_k_shift, down_k_shift;
  int32_t partial_bytes;  // in shared memory: partials, and the values of down's rows
  cuda::Divider by_top_k, by_groups, by_ctas, by_vec8s;  // vec8s: of a row of hidden
  cuda::GatedActivation activation;
  bool before_down;  // router weights multiply the intermediate, not the row
  bool rows_fp32;    // row_format
  RunStatus* status;
};
DecodeArgs decode_args(const StepContext& step);  // decode.cu
// A union with `activation` would change the code of the other functions' kernels.
struct GeluOrSituDecodeArgs : DecodeArgs {
  cuda::GeluOrSitu gelu_or_situ;
};
template <cuda::Gemm1Function kFunction>
using DecodeArgsOf = std::conditional_t<kFunction == cuda::Gemm1Function::kGeluOrSitu,
                                        GeluOrSituDecodeArgs, DecodeArgs>;
template <cuda::Gemm1Function kFunction>
struct Bf16DecodeArgsOf : DecodeArgsOf<kFunction> {
  DecodeLength gate_up, down, shared_down;
};

// ---- routing

// The work of a cta.
struct DecodeShare {
  int32_t active_experts, all_active;  // routed; with the shared expert
  int32_t first_group, last_group;     // groups of gate/up: [first, last)
  int32_t first_block, last_block;     // blocks of 16 output channels: [first, last)

  DecodeShare() = default;
  // Only the blocks, which do not depend on the routing.
  __device__ explicit DecodeShare(const DecodeArgs& args) {
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const int32_t blocks = args.hidden_size / 16;
    first_block = args.by_ctas(blocks * cta), last_block = args.by_ctas(blocks * (cta + 1));
  }
  __device__ void set_active(const DecodeArgs& args, int32_t routed) {
    const auto cta = static_cast<int32_t>(blockIdx.x);
    active_experts = routed, all_active = routed + (args.shared.groups > 0 ? 1 : 0);
    const int32_t groups = active_experts * args.routed.groups + args.shared.groups;
    first_group = args.by_ctas(groups * cta), last_group = args.by_ctas(groups * (cta + 1));
  }
};

struct DecodeScales {
  float gate, up, down;
};

// An active expert is one with rows, and its index counts them in the order of their first
// assignments; the shared expert follows. An assignment of the shared expert has the number T top_k
// + token.
struct alignas(16) DecodeRouting {
  int16_t rows[kDecodeActive][kDecodeTokens];  // assignment of (active expert, token), or -1
  // If several warps route: the first assignment of each local expert that has one, each routed
  // assignment's local expert or -1, and each warp's mask of assignments that are first.
  uint32_t firsts_of[kDecodeExperts];
  int32_t experts[kDecodeAssignments];
  uint32_t firsts[kDecodeAssignments / 32];
  DecodeShare share;
  int32_t active_of[kDecodeAssignments + kDecodeTokens];  // or -1
  int32_t expert_of[kDecodeActive];                       // local expert of each active one
  DecodeScales scales[kDecodeActive];
  // router weights, then the shared expert's; 0 for an assignment without a row
  float weights[kDecodeAssignments + kDecodeTokens];
  int32_t row_count;          // assignments with a row, without the shared expert's
  uint32_t tokens_with_rows;  // bit masks
  uint32_t nonfinite_tokens;
  uint32_t nonfinite_of_warp[kDecodeWarps];  // the bits that each warp has found in its hidden
  uint32_t bad_ids, nonfinite_weights;
  uint32_t grid_before;  // the grid's counter when this cta started (decode_down.cuh)
};

// With bf16 activations.
struct Bf16DecodeRouting : DecodeRouting {
  DecodeRun gate_up[kDecodeWarps], down[kDecodeWarps];  // rows: groups; DecodeDownRow
};

// With E4M3 activations.
struct Fp8DecodeRouting : DecodeRouting {
  uint32_t magnitudes[kDecodeTokens];  // the largest of each row of hidden, as fp32 bits
  unsigned saturated[kDecodeTokens], zeroed[kDecodeTokens];  // blocks of hidden; only in cta 0
  float hidden_scales[kDecodeTokens];                        // NaN for a nonfinite token
  // Rows of the intermediate are sorted by active expert, then by token. A row's rank is its place
  // in that order.
  int16_t first_rank[kDecodeActive + 1];                      // the first rank of an active expert
  int16_t assignment_of[kDecodeAssignments + kDecodeTokens];  // the assignment at a rank
  float row_scales[kDecodeAssignments + kDecodeTokens];       // the scale of an assignment's row
  uint32_t magnitude_of_warp[kDecodeWarps];
};
template <class Products>
using DecodeRoutingOf =
    std::conditional_t<std::is_same_v<Products, Fp8Products>, Fp8DecodeRouting, Bf16DecodeRouting>;

// The warps that route, from the first one on: they have a lane for each assignment.
__device__ inline int32_t routing_warps(const DecodeArgs& args) {
  return static_cast<int32_t>(args.ids.assignments + 31) / 32;
}
// Routes the batch: fills `to`, except for the scales and the nonfinite tokens. Called by `warps`
// warps. All weights wait for this, so what does not depend on the ids is done while they arrive.
__device__ inline void route_decode(const DecodeArgs& args, int32_t warps, DecodeRouting& to) {
  const auto assignment = static_cast<int32_t>(threadIdx.x),
             assignments = static_cast<int32_t>(args.ids.assignments);
  const int32_t lane = assignment % 32;
  const bool has_shared = args.shared.groups > 0;
  int64_t id = -1;
  float weight = 0.0f, factor = 1.0f;
  if (assignment < assignments) {
    id = cuda::global_id(args.ids, assignment);
    weight = __ldcg(args.topk_weights + assignment);
  }
  if (has_shared && assignment < args.tokens && args.shared_weights != nullptr)
    factor = __ldcg(args.shared_weights + assignment);
  const auto wait_for_warps = [&] {
    if (warps == 1)
      __syncwarp();
    else
      cuda::ptx::named_barrier_sync(14, warps * 32);
  };
  const uint4 none = make_uint4(~0u, ~0u, ~0u, ~0u);
  auto* const rows = reinterpret_cast<uint4*>(to.rows);
  rows[assignment + 1] = none;
  if (assignment == 0) {
    rows[0] = none;
    to.row_count = 0, to.tokens_with_rows = has_shared ? ~0u : 0;
    to.bad_ids = to.nonfinite_weights = 0;
  }
  if (warps > 1)
#pragma unroll 1
    for (int32_t i = assignment; i < kDecodeExperts / 4; i += warps * 32)
      reinterpret_cast<uint4*>(to.firsts_of)[i] = none;
  DecodeShare share(args);
  const int32_t token = args.by_top_k(assignment);
  wait_for_warps();

  uint32_t bad = 0;
  const int32_t expert = cuda::local_expert(args.ids, id, bad);
  const bool has_row = expert >= 0;
  // The first assignment of an expert makes it active, and later tokens share its index. If a token
  // chooses an expert again, that assignment has an index of its own.
  int32_t first = assignment, active = 0, active_experts = 0;
  if (warps == 1) {
    const uint32_t earlier = __match_any_sync(cuda::kAllLanes, expert) & ((1u << lane) - 1);
    const bool again = earlier >> (token * args.top_k) != 0;
    if (earlier != 0 && !again) first = __ffs(static_cast<int>(earlier)) - 1;
    const uint32_t firsts = __ballot_sync(cuda::kAllLanes, has_row && first == assignment);
    active = __popc(firsts & ((1u << first) - 1)), active_experts = __popc(firsts);
  } else {
    to.experts[assignment] = expert;
    if (has_row) atomicMin(&to.firsts_of[expert], static_cast<uint32_t>(assignment));
    wait_for_warps();
    if (has_row) {
      bool again = false;
#pragma unroll 4
      for (int32_t other = token * args.top_k; other < assignment; ++other)
        again |= to.experts[other] == expert;
      if (!again) first = static_cast<int32_t>(to.firsts_of[expert]);
    }
    const uint32_t firsts = __ballot_sync(cuda::kAllLanes, has_row && first == assignment);
    if (lane == 0) to.firsts[assignment / 32] = firsts;
    wait_for_warps();
#pragma unroll 1
    for (int32_t warp = 0; warp < warps; ++warp) {
      const uint32_t of_warp = to.firsts[warp];
      active += __popc(warp < first / 32    ? of_warp
                       : warp == first / 32 ? of_warp & ((1u << first % 32) - 1)
                                            : 0u);
      active_experts += __popc(of_warp);
    }
  }
  if (assignment < 32) {
    share.set_active(args, active_experts);
    if (lane == 0) to.share = share;
  }
  if (assignment < assignments) {
    to.active_of[assignment] = has_row ? active : -1;
    to.weights[assignment] = has_row ? weight : 0.0f;
  }
  if (has_row) {
    to.rows[active][token] = static_cast<int16_t>(assignment);
    if (first == assignment) to.expert_of[active] = expert;
  }
  uint32_t nonfinite_weights = has_row && cuda::magnitude_bits(weight) >= cuda::kInfBits;
  if (has_shared && assignment < args.tokens) {
    to.rows[active_experts][assignment] = static_cast<int16_t>(assignments + assignment);
    to.active_of[assignments + assignment] = active_experts;
    to.weights[assignments + assignment] = factor;
    nonfinite_weights += cuda::magnitude_bits(factor) >= cuda::kInfBits;
    if (assignment == 0) to.expert_of[active_experts] = 0;
  }
  const int32_t row_count = __popc(__ballot_sync(cuda::kAllLanes, has_row));
  const uint32_t tokens = __reduce_or_sync(cuda::kAllLanes, has_row ? 1u << token : 0u);
  bad = __reduce_add_sync(cuda::kAllLanes, bad);
  nonfinite_weights = __reduce_add_sync(cuda::kAllLanes, nonfinite_weights);
  if (lane != 0) return;
  atomicAdd(&to.row_count, row_count);
  atomicOr(&to.tokens_with_rows, tokens);
  atomicAdd(&to.bad_ids, bad);
  atomicAdd(&to.nonfinite_weights, nonfinite_weights);
}

// ---- hidden

// The element of a row of activations at k, in the order of B fragments: in each 32 k a lane's
// eight elements are consecutive.
__device__ inline int32_t fragment_element(int32_t k) {
  const int32_t in = k & 31;
  return (k & ~31) + ((in & 7) >> 1) * 8 + (in >> 4) * 4 + ((in >> 3) & 1) * 2 + (in & 1);
}

// Rounds hidden to bf16 into `to` (T, row_bytes), in the order of B fragments, and returns the bit
// mask of the tokens in which this thread has read NaN or Inf. Called by `threads` threads. A
// thread starts the reads of several vectors before it uses any, so that they overlap.
// kAligned: hidden is bf16 and aligned to 16 bytes.
template <DType kType, bool kAligned>
__device__ uint32_t read_hidden(const DecodeArgs& args, uint8_t* to, int32_t row_bytes,
                                int32_t thread, int32_t threads) {
  constexpr int kAtOnce = kAligned ? 4 : 1;
  const int32_t vec8s = args.k_tiles * (cuda::kTileK / 8), all = args.tokens * vec8s;
  uint32_t nonfinite = 0;
#pragma unroll 1
  for (int32_t first = thread; first < all; first += kAtOnce * threads) {
    uint4 vectors[kAtOnce];
    int32_t tokens[kAtOnce], ks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t at = first + i * threads;
      tokens[i] = args.by_vec8s(at), ks[i] = (at - tokens[i] * vec8s) * 8;
      vectors[i] = uint4{};
      const int64_t element = int64_t{tokens[i]} * args.hidden_size + ks[i];
      if (at >= all || ks[i] >= args.hidden_size) continue;
      if constexpr (kAligned) {
        vectors[i] =
            *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.hidden) + element);
      } else {
        float x[8];
        cuda::load_elements<kType>(args.hidden, element, x);
        uint32_t magnitude = 0;
#pragma unroll
        for (const float value : x) magnitude = max(magnitude, cuda::magnitude_bits(value));
        vectors[i] = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                                bf16_pair(x[6], x[7]));
        nonfinite |= static_cast<uint32_t>(magnitude >= cuda::kInfBits) << tokens[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * threads >= all) break;
      if constexpr (kAligned)
        nonfinite |= static_cast<uint32_t>(any_nonfinite(vectors[i])) << tokens[i];
      auto* const row =
          reinterpret_cast<uint32_t*>(to + tokens[i] * row_bytes) + fragment_element(ks[i]) / 2;
      row[0] = vectors[i].x, row[4] = vectors[i].y, row[8] = vectors[i].z, row[12] = vectors[i].w;
    }
  }
  return nonfinite;
}

}  // namespace nvfp4_moe::internal::sm90
