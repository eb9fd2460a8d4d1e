// Layers whose sums are exact in fp32, in any order and however wide a tensor core adds: all
// kernels that compute them right give the same bits.
//
// Columns of hidden come in pairs of one value, and the weights of gate and up in pairs (w, -w), so
// that all products count and cancel. The rest of gate is at least 36, where the functions of
// swiglu and gelu equal their gate in fp32 and an approximate exponential gives the same bits. The
// rest of up is a value of hidden times a power of two. So the intermediate is the same for all
// kernels. The products of gemm2 are whole multiples of one step, and their sums are below 2^24 of
// them up to an intermediate size of 1936; under situ a row of down has at most 1,024 weights other
// than 0. Router weights are powers of two. A row is rounded to bf16 after its exact sum.
//
// Biases of gate and up are whole multiples of a step of their sums, and leave gate at 36 or more.
// The intermediate then has more bits, so there are fewer products in gemm2.
//
// Under fp8 all sums are below 2^13 steps too, since Hopper's FP8 tensor cores add with 13 bits:
// values of hidden are 2 to 6, and weights are 0, 1/2 or 1 but for one pair of each row.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace nvfp4_moe::internal {

// Multiples of 16; hidden from 64 on.
struct ExactSizes {
  int64_t experts = 4, top_k = 2;
  int64_t hidden = 1040, intermediate = 336;  // neither a multiple of a tile or k-block
};

// The options of such a layer, whose rows are fp32. Clamped functions and situ get limits that some
// values reach. batch_invariant: no tile is split along K.
//
// The caller may also set row_format, shared_intermediate_size, and either router_weight
// before_down or expert_biases, the latter with an intermediate size up to 144.
MoeOptions exact_options(const ExactSizes& sizes, ActivationFormat format,
                         Activation activation = Activation::kSwiglu, bool batch_invariant = false);

// The weights of its experts, (num_experts), and of the shared one at the end if there is one.
std::vector<ExpertBuffers> exact_experts(const MoeConfig& config, uint64_t seed);

struct ExactBatch {
  int64_t tokens = 0;
  std::vector<uint16_t> hidden;     // (tokens, hidden_size) bf16
  std::vector<int32_t> topk_ids;    // (tokens, top_k)
  std::vector<float> topk_weights;  // (tokens, top_k)
};
// topk_ids: (tokens, top_k), given by the caller.
ExactBatch exact_batch(const MoeConfig& config, std::vector<int32_t> topk_ids, uint64_t seed);
// Ids that give expert e rows[e] assignments, none of them twice to one token, in an order that is
// not that of the tokens. As few tokens as that takes.
std::vector<int32_t> ids_of_rows(const std::vector<int64_t>& rows, int64_t top_k);

}  // namespace nvfp4_moe::internal
