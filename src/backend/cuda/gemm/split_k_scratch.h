// Scratch memory of a backend whose GEMMs split tiles along K, in addition to the layer's arrays:
// the CUDA backends' common part, the accumulators of the splits, and the counters at which splits
// arrive.
#pragma once

#include "backend/cuda/scratch.h"

namespace nvfp4_moe::internal::cuda {

// kMaxCtas: of one GEMM.
template <int kMaxCtas>
struct SplitKScratch {
  Scratch common;
  int32_t* arrivals = nullptr;  // (kMaxCtas) cleared by route and by the last cta to arrive
  float* partials = nullptr;    // (2 kMaxCtas) x the plan's partial_bytes: two per cta

  SplitKScratch(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan,
                Arena& arena)
      : common(config, range, plan, arena) {
    arrivals = arena.take<int32_t>("cuda.", "arrivals", kMaxCtas);
    partials =
        arena.take<float>("cuda.", "partials",
                          2 * kMaxCtas * plan.partial_bytes / static_cast<int64_t>(sizeof(float)));
  }
  // For a step: its arrays follow the layer's.
  explicit SplitKScratch(const StepContext& step) : SplitKScratch(step, step.scratch) {}

  // Part of the interface of an Architecture (backend/cuda/layer.h).
  static void take(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan,
                   Arena& arena) {
    SplitKScratch(config, range, plan, arena);
  }
  static int32_t* counters(const StepContext& step) { return SplitKScratch(step).arrivals; }

 private:
  SplitKScratch(const StepContext& step, Arena arena)
      : SplitKScratch(step.weights.config, step.weights.range, *step.plan, arena) {}
};

}  // namespace nvfp4_moe::internal::cuda
