// The CPU backend's own memory during a run: activation operands as its kernels read them, and the
// list of experts with rows.
//
// Everything is sized for the batch's number of tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cpu {

// The distance between rows: an odd multiple of 64 bytes, so that the same k of many rows falls
// into different cache sets. (Rows of 4096 bytes would all fall into one.)
constexpr int64_t pitch_bytes(int64_t used_bytes) { return ((used_bytes + 63) / 64 | 1) * 64; }

// Rows of operands: row i at bytes + i * row_bytes.
struct Operands {
  ActivationFormat format = ActivationFormat::kNvfp4;
  int64_t k = 0;
  int64_t row_bytes = 0;
  std::byte* bytes = nullptr;
  bool same_bits = false;       // OperandRows::same_bits
  bool for_single_row = false;  // OperandRows::for_single_row

  // Up to `single_rows` rows most experts have a single one.
  static Operands make(ActivationFormat format, int64_t k, int64_t rows, int64_t single_rows,
                       const Kernels& kernels, Arena& arena, const char* name, bool same_bits) {
    const Multiplication& multiplication = kernels.multiplication(format);
    const int64_t chunk_bytes = multiplication.chunk_bytes,
                  more_bytes = multiplication.single_row_chunk_bytes;
    const int64_t row_bytes = pitch_bytes(chunks_of(k) * chunk_bytes),
                  single_row_bytes = pitch_bytes(chunks_of(k) * (chunk_bytes + more_bytes));
    const bool for_single_row = more_bytes > 0 && rows <= single_rows && !same_bits;
    // At least as much as for fewer rows, since a workspace is sized for the largest batch.
    const int64_t bytes = std::max((rows + multiplication.tile_rows - 1) * row_bytes,
                                   std::min(rows, single_rows) * single_row_bytes);
    return {.format = format,
            .k = k,
            .row_bytes = for_single_row ? single_row_bytes : row_bytes,
            .bytes = arena.take<std::byte>("operands.", name, bytes),
            .same_bits = same_bits,
            .for_single_row = for_single_row};
  }
  std::byte* row(int64_t i) const { return bytes + i * row_bytes; }
};

struct LayerScratch {
  int32_t* active_experts = nullptr;  // (experts) with rows, of the current part
  Operands hidden;  // (T, H) for the routed experts, and for the shared one if both read the same
  Operands shared_hidden;  // (T, H) for the shared expert under on_input; or empty
  Operands hidden_rows;    // (T k, H) in expert order, if operands must be equally spaced; or empty
  Operands routed;         // (T k, I)
  Operands shared;         // (T, shared I)

  LayerScratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens,
               const Kernels& kernels, Arena& arena) {
    const ActivationFormat format = config->activation_format;
    const bool same_bits = config->batch_invariant;
    const int64_t top_k = config->top_k, single = std::max<int64_t>(1, config->num_experts / top_k);
    active_experts = arena.take<int32_t>("cpu.", "active_experts", range.count);
    hidden = Operands::make(format, config->hidden_size, tokens, single, kernels, arena, "hidden",
                            same_bits);
    if (router_weight_on_input(config) && config->shared_intermediate_size > 0)
      shared_hidden = Operands::make(format, config->hidden_size, tokens, 1, kernels, arena,
                                     "shared_hidden", same_bits);
    if (kernels.multiplication(format).tile_rows > 1)
      hidden_rows = Operands::make(format, config->hidden_size, tokens * top_k, single * top_k,
                                   kernels, arena, "hidden_rows", same_bits);
    routed = Operands::make(format, config->intermediate_size, tokens * top_k, single * top_k,
                            kernels, arena, "routed", same_bits);
    if (config->shared_intermediate_size > 0)
      shared = Operands::make(format, config->shared_intermediate_size, tokens, 1, kernels, arena,
                              "shared", same_bits);
  }
  const Operands& intermediate(const PartBuffers& part) const {
    return part.assignment_of_row == nullptr ? shared : routed;
  }
  // Whether gemm1's operands are in expert order, one per row, not one per token.
  bool by_row(const PartBuffers& part) const {
    return part.assignment_of_row == nullptr || hidden_rows.bytes != nullptr;
  }
  const Operands& gemm1(const PartBuffers& part) const {
    if (part.assignment_of_row == nullptr)
      return shared_hidden.bytes != nullptr ? shared_hidden : hidden;
    return hidden_rows.bytes != nullptr ? hidden_rows : hidden;
  }
};

}  // namespace nvfp4_moe::internal::cpu
