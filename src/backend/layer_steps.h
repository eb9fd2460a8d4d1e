// The arrays that are passed between the steps of a layer, and the steps that read and write them.
//
// reference and cpu use the same arrays, so tests can feed a step of one with the other's inputs
// and compare. cuda places the same arrays in device memory: its pointers, and those of the batch,
// are device pointers, and a step enqueues its work in the call's stream. Sizes: T tokens, k =
// top_k, R <= T k rows, H hidden, I intermediate, E local experts. A "part" is the routed experts
// or the shared expert. The shared part has one expert, T rows (row = token) and its own
// intermediate size.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace nvfp4_moe::internal {

// Activations of one GEMM. Rows are tokens (gemm1) or rows in expert order (gemm2). A row that
// contains NaN or Inf has a flag in `nonfinite`.
struct ActivationBuffers {
  uint8_t* codes = nullptr;         // (rows, K/2)           nvfp4
  uint8_t* block_scales = nullptr;  // (rows, K/16) linear   nvfp4
  float* row_scale = nullptr;       // (rows)                nvfp4, fp8
  uint16_t* bf16 = nullptr;      // (rows, K)             bf16, and the intermediate in every format
  int8_t* int8_codes = nullptr;  // (rows, K)             int8_block
  float* int8_scales = nullptr;  // (rows, K/16)          int8_block
  uint8_t* fp8 = nullptr;        // (rows, K) E4M3        fp8
  uint8_t* nonfinite = nullptr;  // (rows) 1 if the output of the row must be NaN
};

struct PartBuffers {
  int64_t experts = 0;  // E, or 1 for the shared part
  ActivationBuffers
      hidden;  // (T, H) input of gemm1; both parts share the arrays, except under on_input
  int64_t intermediate_size = 0;   // I
  int64_t* row_offsets = nullptr;  // (experts + 1) first row of each expert
  // (R) token * top_k + k of each row; the shared part: null, row = token
  int32_t* assignment_of_row = nullptr;
  ActivationBuffers intermediate;  // (R, I)
  void* rows_out = nullptr;        // (R, H) bf16 or fp32 by config row_format
  bool down_only = false;          // the part has weights of `down` only: a dense linear
};

struct LayerBuffers {
  RunStatus* status = nullptr;
  int32_t* row_of_assignment = nullptr;  // (T k) row of each assignment, -1 if it has none
  // (T, H) on_input: hidden times its router weight, in hidden's dtype
  void* weighted_hidden = nullptr;
  PartBuffers routed;
  PartBuffers shared;  // experts = 0 if the layer has no shared expert
};

// Places the arrays of a run with that many tokens. A backend places its own arrays after them.
LayerBuffers layer_buffers(const MoeConfig& config, const ExpertRange& range, int64_t tokens,
                           Arena& arena);
// kInvalidArgument if the arena's size would overflow or rows would not fit into int32. plan calls
// it first.
Status check_layer_limits(const MoeConfig& config, const ExpertRange& range, const Limits& limits);

struct RunPlan;      // device backends (backend/cuda/run_plan.h): describes one run
struct AwaitedRows;  // all_to_all on devices (backend/device_exchange.h)

struct StepContext {
  const PackedWeights& weights;
  const Batch& batch;
  const LayerBuffers& buffers;
  Executor& executor;
  Arena scratch = {};             // free space after the layer's arrays, for the backend's own
  void* stream = nullptr;         // device backends
  const RunPlan* plan = nullptr;  // device backends
  // device backends: set if combine's rows come from other ranks
  const AwaitedRows* awaited = nullptr;
};

// on_input: the routed experts' hidden is multiplied by the router weight, the shared expert's is
// not.
inline bool router_weight_on_input(const MoeConfig& config) {
  return config->router_weight == RouterWeight::kOnInput;
}

// Token of a row, for either part.
inline int64_t token_of_row(const PartBuffers& part, int64_t row, int64_t top_k) {
  return part.assignment_of_row == nullptr ? row : part.assignment_of_row[row] / top_k;
}

// The layer as one function per step, in execution order. A step fails if it cannot be enqueued.
struct LayerSteps {
  Status (*route)(const StepContext&);  // ids -> row_of_assignment, assignment_of_row, row_offsets
  Status (*quantize)(const StepContext&);  // hidden -> routed.hidden, shared.hidden
  Status (*gemm1_swiglu)(const StepContext&,
                         const PartBuffers&);  // hidden, gate, up -> part.intermediate.bf16
  Status (*requantize)(const StepContext&,
                       const PartBuffers&);  // part.intermediate.bf16 -> codes, scales, nonfinite
  Status (*gemm2)(const StepContext&,
                  const PartBuffers&);    // part.intermediate, down -> part.rows_out
  Status (*combine)(const StepContext&);  // rows_out, weights -> out
  // Makes the StepContext::plan for steps that are called one by one; null: they need no plan.
  std::shared_ptr<const RunPlan> (*plan)(const PackedWeights&, const Plan&, const Batch&) = nullptr;
  // Device backends: the GEMMs' counters, which are 0 after route; null if there are none. The plan
  // has their number.
  int32_t* (*counters)(const StepContext&) = nullptr;
};

// Wraps a step that cannot fail as an entry of LayerSteps.
template <auto kStep, class... Part>
Status succeed(const StepContext& step, Part&... part) {
  kStep(step, part...);
  return {};
}

// Backend::allocate of host backends: zero-filled pages.
inline Result<Buffer> allocate_host(size_t size_bytes, int, const char* purpose) {
  return allocate_pages(size_bytes, purpose);
}

// The tensor scale of every row under `static`, `fixed` and `vllm_order`, computed once from config
// and checkpoint. kInvalidArgument if the config needs one that neither provides.
struct ActivationScales {
  float hidden = 0.0f;        // 0 under dynamic_token
  float intermediate = 0.0f;  // 0 under dynamic_token
};
Result<ActivationScales> resolve_activation_scales(const MoeConfig& config,
                                                   const LayerScales& scales);

}  // namespace nvfp4_moe::internal
