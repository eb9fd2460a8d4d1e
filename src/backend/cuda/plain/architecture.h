// The plain GEMMs as an architecture: bf16 operands on mma.sync m16n8k16, which every GPU from
// sm_80 on has. They are the whole backend `cuda`, and sm120 uses them for bf16 activations.
#pragma once

#include "backend/cuda/layer.h"
#include "backend/cuda/plain/config.h"
#include "backend/cuda/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cuda::plain {

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part);
Status gemm2(const StepContext& step, const PartBuffers& part);

inline void take_scratch(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan,
                         Arena& arena) {
  Scratch(config, range, plan, arena);
}
inline int32_t* no_counters(const StepContext&) { return nullptr; }

// backend: the registry name of the backend that runs them.
constexpr Architecture architecture(const char* backend) {
  return {
      .gemms = {backend, kConfigs, routed_config, shared_config, splits_k, 0},
      .gemm_kind = "mma_m16n8k16",
      .quantize_into_rows = nullptr,
      .gemm1_swiglu = gemm1_swiglu,
      .gemm2 = gemm2,
      .take_scratch = take_scratch,
      .counters = no_counters,
  };
}

}  // namespace nvfp4_moe::internal::cuda::plain
