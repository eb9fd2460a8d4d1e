// A layer on a GPU, for any GEMMs: what it supports, its plan, and its run through the steps.
//
// An architecture provides its GEMMs and the table of their configurations. Everything else of its
// backend is implemented here.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/pack/pack.h"
#include "backend/cuda/run_plan.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cuda {

struct Architecture {
  GemmTable gemms;
  const char* gemm_kind;  // kind of all configurations, for the plan: "wgmma"
  // Writes hidden in expert order if the plan requests it; null if no configuration needs it.
  Status (*quantize_into_rows)(const StepContext& step);
  Status (*gemm1_swiglu)(const StepContext& step, const PartBuffers& part);
  Status (*gemm2)(const StepContext& step, const PartBuffers& part);
  // Places the architecture's arrays, which begin with cuda's Scratch.
  void (*take_scratch)(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan,
                       Arena& arena);
  // The counters that route sets to 0, (gemms.max_ctas); null if there are none.
  int32_t* (*counters)(const StepContext& step);
  // All steps in one kernel, if gemms.one_launch plans it.
  Status (*run_in_one_launch)(const StepContext& step) = nullptr;
};

// Ok for layers that all GPU backends support, apart from the architecture.
Status supports_config(const MoeConfig& config);
Status decline_fp8(const MoeConfig& config);        // for an architecture without fp8 GEMMs
Status supports_device(const DeviceFacts& device);  // a CUDA device of sm_80 or later
// Whether this build has code that Thor (compute capability 11.0) runs, and code compiled for it.
bool has_code_for_11();
bool has_code_for_thor();

Result<Plan> make_plan(const Architecture& architecture, const MoeConfig& config,
                       const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                       const DeviceFacts& device);
// Workspace and plan of a run with that many tokens.
size_t workspace_bytes(const Architecture& architecture, const MoeConfig& config,
                       const ExpertRange& range, const Plan& plan, int64_t tokens);
std::vector<StepPlan> describe_run(const Architecture& architecture, const MoeConfig& config,
                                   const ExpertRange& range, const Plan& plan, int64_t tokens);
std::vector<int> gemm_tile_rows(const GemmTable& gemms);
// Plans the run, then enqueues it in context.stream.
Status run_layer(const Architecture& architecture, const PackedWeights& weights, const Plan& plan,
                 const Batch& batch, std::byte* workspace, const RunContext& context);
// For steps that are called one by one.
std::shared_ptr<const RunPlan> plan_single_steps(const Architecture& architecture,
                                                 const PackedWeights& weights, const Plan& plan,
                                                 const Batch& batch);
Status run_route(const Architecture& architecture, const StepContext& step);
Status run_quantize(const Architecture& architecture, const StepContext& step);

// A dense linear: quantize, then the architecture's gemm2 with one matrix (steps/linear.cu). If the
// architecture multiplies FP4, gemm2 reads its operand from intermediate.codes, in rows of
// fp4_row_bytes.
size_t linear_bytes(int64_t rows, int64_t cols);
Status linear_pack(const TileFormat& format, LinearWeights& weights, const Nvfp4View& source);
inline Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  return linear_pack(kBf16Tiles, weights, source);
}
size_t linear_workspace_bytes(const Architecture& architecture, const LinearWeights& weights,
                              int64_t max_tokens);
Status linear_run(const Architecture& architecture, const LinearWeights& weights,
                  const LinearBatch& batch, std::byte* workspace, const RunContext& context);

extern const DeviceMemory kMemory;

// The functions of a Backend without the architecture argument: one set per architecture.
template <const Architecture& kArchitecture>
struct BackendFunctions {
  static Result<Plan> plan(const MoeConfig& config, const ExpertRange& range,
                           const LayerScales& scales, const Limits& limits,
                           const DeviceFacts& device) {
    return make_plan(kArchitecture, config, range, scales, limits, device);
  }
  static Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch,
                    std::byte* workspace, const RunContext& context) {
    return run_layer(kArchitecture, weights, plan, batch, workspace, context);
  }
  static size_t workspace_bytes(const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                                int64_t tokens) {
    return cuda::workspace_bytes(kArchitecture, config, range, plan, tokens);
  }
  static std::vector<StepPlan> describe_run(const MoeConfig& config, const ExpertRange& range,
                                            const Plan& plan, int64_t tokens) {
    return cuda::describe_run(kArchitecture, config, range, plan, tokens);
  }
  static std::vector<int> gemm_tile_rows(ActivationFormat) {
    return cuda::gemm_tile_rows(kArchitecture.gemms);
  }
  static size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens) {
    return cuda::linear_workspace_bytes(kArchitecture, weights, max_tokens);
  }
  static Status linear_run(const LinearWeights& weights, const LinearBatch& batch,
                           std::byte* workspace, const RunContext& context) {
    return cuda::linear_run(kArchitecture, weights, batch, workspace, context);
  }
  static Status route(const StepContext& step) { return run_route(kArchitecture, step); }
  static Status quantize(const StepContext& step) { return run_quantize(kArchitecture, step); }
  static std::shared_ptr<const RunPlan> plan_steps(const PackedWeights& weights, const Plan& plan,
                                                   const Batch& batch) {
    return plan_single_steps(kArchitecture, weights, plan, batch);
  }
};

}  // namespace nvfp4_moe::internal::cuda
