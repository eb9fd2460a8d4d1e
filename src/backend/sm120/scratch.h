// What the sm120 backend keeps beside the layer's arrays: the CUDA backends' common part, and for tiles that are split
// along K the accumulators of their splits and the counters at which these arrive.
#pragma once

#include "backend/cuda/scratch.h"
#include "backend/sm120/config.h"

namespace nvfp4_moe::sm120 {

struct Scratch {
  cuda::Scratch common;
  int32_t* arrivals = nullptr;  // (kMaxCtas), cleared by route and by the last to arrive
  float* partials = nullptr;    // (2 kMaxCtas) x the plan's partial_bytes: two a cta

  Scratch(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan, Arena& arena)
      : common(config, range, plan, arena) {
    arrivals = arena.take<int32_t>("sm120.", "arrivals", kMaxCtas);
    partials = arena.take<float>("sm120.", "partials",
                                 2 * kMaxCtas * plan.partial_bytes / static_cast<int64_t>(sizeof(float)));
  }
  // Of a step: its arrays lie behind the layer's.
  explicit Scratch(const StepContext& step) : Scratch(step, step.scratch) {}

 private:
  Scratch(const StepContext& step, Arena arena) : Scratch(step.weights.config, step.weights.range, *step.plan, arena) {}
};

}  // namespace nvfp4_moe::sm120
