// Batch: one call's borrowed inputs and output.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace nvfp4_moe::internal {

struct SelectExperts;  // core/router.h

struct Batch {
  int64_t tokens = 0;
  const void* hidden = nullptr;  // (tokens, hidden_size) row-major
  DType hidden_dtype = DType::kBf16;
  const void* topk_ids = nullptr;         // (tokens, top_k) global expert ids; -1 = no expert
  DType ids_dtype = DType::kI32;          // kI32 or kI64
  const float* topk_weights = nullptr;    // (tokens, top_k)
  const float* shared_weights = nullptr;  // (tokens), factor of the shared expert's row; null = 1
  void* out = nullptr;                    // (tokens, hidden_size) row-major
  DType out_dtype = DType::kBf16;
  // If not null, the run selects the experts itself by this call, which writes topk_ids and
  // topk_weights.
  const SelectExperts* selection = nullptr;
};

// Counts of a run. The run writes them to the workspace, and its first step clears them. They can
// be read after the run.
struct RunStatus {
  uint64_t bad_expert_ids = 0;    // ids that are neither -1 nor in [0, num_experts); skipped
  uint64_t nonfinite_tokens = 0;  // tokens whose hidden holds NaN or Inf; their output rows are NaN
  uint64_t nonfinite_rows = 0;    // rows whose intermediate is not finite
  // quantized blocks; below: those saturated at 448, and those rounded to scale 0
  uint64_t hidden_blocks = 0;
  uint64_t hidden_saturated = 0;
  uint64_t hidden_zeroed = 0;
  uint64_t intermediate_blocks = 0;
  uint64_t intermediate_saturated = 0;
  uint64_t intermediate_zeroed = 0;
  // Router weights that are NaN or Inf, of assignments that have a row, and such factors of the
  // shared expert.
  uint64_t nonfinite_weights = 0;
  // Elements of out that are NaN or Inf as stored, for any reason. If tokens and weights are
  // finite, the reason is overflow.
  uint64_t nonfinite_outputs = 0;
};

}  // namespace nvfp4_moe::internal
