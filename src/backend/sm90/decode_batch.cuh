// The batch of a layer in one launch (decode.cuh): the kernel's arguments, the routing, which each
// cta computes for itself, and hidden in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/gemm/biases.cuh"
#include "backend/cuda/gemm/gated_activation.cuh"
#include "backend/cuda/gemm/scheduler.h"
#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
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
  cuda::Divider by_top_k, by_groups, by_ctas;
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

struct DecodeScales {
  float gate, up, down;
};

// An active expert is one with rows, and its index counts them in the order of their first
// assignments; the shared expert follows. An assignment of the shared expert has the number T top_k
// + token.
struct alignas(8) DecodeRouting {       // some members are accessed in pairs
  uint32_t firsts_of[kDecodeExperts];   // first assignment of each local expert that has one
  int32_t experts[kDecodeAssignments];  // each routed assignment's local expert, or -1
  int32_t active_of[kDecodeAssignments + kDecodeTokens];  // or -1
  int32_t expert_of[kDecodeActive];                       // local expert of each active one
  int16_t rows[kDecodeActive][kDecodeTokens];  // assignment of (active expert, token), or -1
  DecodeScales scales[kDecodeActive];
  // router weights, then the shared expert's; 0 for an assignment without a row
  float weights[kDecodeAssignments + kDecodeTokens];
  int32_t active_experts;     // without the shared expert
  int32_t row_count;          // assignments with a row, without the shared expert's
  uint32_t tokens_with_rows;  // bit masks
  uint32_t nonfinite_tokens;
  uint32_t nonfinite_of_warp[kDecodeWarps];  // the bits that each warp has found in its hidden
  uint32_t bad_ids, nonfinite_weights;
};

// With bf16 activations. The intermediate's rows are awaited in parts of kDecodeWarps experts.
struct Bf16DecodeRouting : DecodeRouting {
  static constexpr int kParts = (kDecodeActive + kDecodeWarps - 1) / kDecodeWarps;
  uint64_t rows_full[kParts];  // mbarriers: the rows of a part are in shared memory
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

// Routes up to 32 kPer assignments: fills `to`, except for scales and the nonfinite tokens. Called
// by one warp. A lane has every 32nd assignment.
template <int kPer>
__device__ void route_decode(const DecodeArgs& args, DecodeRouting& to) {
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const auto assignments = static_cast<int32_t>(args.ids.assignments);
  const bool has_shared = args.shared.groups > 0;
  int64_t ids[kPer];
  float weights[kPer], factor = 1.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t assignment = i * 32 + lane;
    ids[i] = -1, weights[i] = 0.0f;
    if (assignment < assignments) {
      ids[i] = cuda::global_id(args.ids, assignment);
      weights[i] = __ldcg(args.topk_weights + assignment);
    }
  }
  if (has_shared && lane < args.tokens && args.shared_weights != nullptr)
    factor = __ldcg(args.shared_weights + lane);
  uint32_t bad = 0, nonfinite_weights = 0, tokens_with_rows = 0;
  int32_t experts[kPer], tokens[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t assignment = i * 32 + lane;
    experts[i] = cuda::local_expert(args.ids, ids[i], bad);
    tokens[i] = args.by_top_k(assignment);
    if (assignment < assignments) to.experts[assignment] = experts[i];
    if (experts[i] < 0) continue;
    to.firsts_of[experts[i]] = ~0u;
    nonfinite_weights += cuda::magnitude_bits(weights[i]) >= cuda::kInfBits;
    tokens_with_rows |= 1u << tokens[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (experts[i] >= 0) atomicMin(&to.firsts_of[experts[i]], static_cast<uint32_t>(i * 32 + lane));
  __syncwarp();
  // The first assignment of an expert makes it active, and later tokens share its index. If a token
  // chooses an expert again, that assignment has an index of its own.
  int32_t firsts[kPer];
  uint32_t masks[kPer];
  int32_t active_experts = 0, row_count = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t assignment = i * 32 + lane;
    firsts[i] = assignment;
    if (experts[i] >= 0) {
      bool again = false;
#pragma unroll 4
      for (int32_t other = tokens[i] * args.top_k; other < assignment; ++other)
        again |= to.experts[other] == experts[i];
      if (!again) firsts[i] = static_cast<int32_t>(to.firsts_of[experts[i]]);
    }
    masks[i] = __ballot_sync(cuda::kAllLanes, experts[i] >= 0 && firsts[i] == assignment);
    active_experts += __popc(masks[i]);
    row_count += __popc(__ballot_sync(cuda::kAllLanes, experts[i] >= 0));
  }
  auto* const rows = reinterpret_cast<uint32_t*>(&to.rows[0][0]);
#pragma unroll 1
  for (int32_t i = lane; i < (active_experts + has_shared) * (kDecodeTokens / 2); i += 32)
    rows[i] = ~0u;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t assignment = i * 32 + lane;
    if (assignment >= assignments) continue;
    int32_t active = 0;
#pragma unroll
    for (int word = 0; word < kPer; ++word)
      active += __popc(masks[word] & (word < firsts[i] / 32    ? ~0u
                                      : word == firsts[i] / 32 ? (1u << firsts[i] % 32) - 1
                                                               : 0u));
    const bool has_row = experts[i] >= 0;
    to.active_of[assignment] = has_row ? active : -1;
    to.weights[assignment] = has_row ? weights[i] : 0.0f;
    if (!has_row) continue;
    to.rows[active][tokens[i]] = static_cast<int16_t>(assignment);
    if (firsts[i] == assignment) to.expert_of[active] = experts[i];
  }
  if (has_shared && lane < args.tokens) {
    to.rows[active_experts][lane] = static_cast<int16_t>(assignments + lane);
    to.active_of[assignments + lane] = active_experts;
    to.weights[assignments + lane] = factor;
    nonfinite_weights += cuda::magnitude_bits(factor) >= cuda::kInfBits;
    if (lane == 0) to.expert_of[active_experts] = 0;
  }
  tokens_with_rows = __reduce_or_sync(cuda::kAllLanes, tokens_with_rows);
  bad = __reduce_add_sync(cuda::kAllLanes, bad);
  nonfinite_weights = __reduce_add_sync(cuda::kAllLanes, nonfinite_weights);
  if (lane != 0) return;
  to.active_experts = active_experts, to.row_count = row_count;
  to.tokens_with_rows = has_shared ? ~0u : tokens_with_rows;
  to.bad_ids = bad, to.nonfinite_weights = nonfinite_weights;
}

// ---- hidden

// The element of a row of activations at k, in the order of B fragments: in each 32 k a lane's
// eight elements are consecutive.
__device__ inline int32_t fragment_element(int32_t k) {
  const int32_t in = k & 31;
  return (k & ~31) + ((in & 7) >> 1) * 8 + (in >> 4) * 4 + ((in >> 3) & 1) * 2 + (in & 1);
}

// Eight elements of hidden, rounded to bf16. Sets nonfinite if one was NaN or Inf before rounding.
template <DType kType>
__device__ uint4 hidden_vector(const void* hidden, int64_t first, bool& nonfinite) {
  if constexpr (kType == DType::kBf16)
    if (reinterpret_cast<uintptr_t>(hidden) % 16 == 0) {
      const uint4 vector =
          *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(hidden) + first);
      nonfinite |= any_nonfinite(vector);
      return vector;
    }
  float x[8];
  cuda::load_elements<kType>(hidden, first, x);
  uint32_t words[4], magnitude = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    magnitude =
        max(magnitude, max(cuda::magnitude_bits(x[2 * i]), cuda::magnitude_bits(x[2 * i + 1])));
    words[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
  }
  nonfinite |= magnitude >= cuda::kInfBits;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Rounds hidden to bf16 into `to` (T, row_bytes), in the order of B fragments, and returns the bit
// mask of the tokens in which this thread has read NaN or Inf. Called by `threads` threads. A
// thread starts the reads of several tokens before it uses any, so that they overlap.
template <DType kType>
__device__ uint32_t read_hidden(const DecodeArgs& args, uint8_t* to, int32_t row_bytes,
                                int32_t thread, int32_t threads) {
  constexpr int kAtOnce = 4;
  uint32_t nonfinite = 0;
  const int32_t padded = args.k_tiles * cuda::kTileK;
#pragma unroll 1
  for (int32_t first = 0; first < args.tokens; first += kAtOnce)
#pragma unroll 1
    for (int32_t k = thread * 8; k < padded; k += threads * 8) {
      uint4 vectors[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        vectors[i] = uint4{};
        bool bad = false;
        if (first + i < args.tokens && k < args.hidden_size)
          vectors[i] =
              hidden_vector<kType>(args.hidden, int64_t{first + i} * args.hidden_size + k, bad);
        nonfinite |= static_cast<uint32_t>(bad) << (first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= args.tokens) break;
        auto* const row =
            reinterpret_cast<uint32_t*>(to + (first + i) * row_bytes) + fragment_element(k) / 2;
        row[0] = vectors[i].x, row[4] = vectors[i].y, row[8] = vectors[i].z, row[12] = vectors[i].w;
      }
    }
  return nonfinite;
}

}  // namespace nvfp4_moe::internal::sm90
