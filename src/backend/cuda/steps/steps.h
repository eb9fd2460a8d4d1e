// The steps of the layer on a GPU, in execution order. Each enqueues its kernels in step.stream as
// step.plan describes, and fails if a launch does.
#pragma once

#include "backend/cuda/run_plan.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cuda {

// cleared: (step.plan->route.cleared_counters) counters that are 0 after route, or null if there
// are none.
Status route(const StepContext& step, int32_t* cleared);
// on_input, between route and quantize: writes weighted_hidden of the tokens that have a row. If a
// shared expert multiplies the unweighted hidden, it counts tokens that only the weight makes
// nonfinite.
Status scale_hidden(const StepContext& step);
// Writes routed.hidden, which is also shared.hidden except under on_input.
Status quantize(const StepContext& step);
// Writes shared.hidden under on_input.
Status quantize_shared_hidden(const StepContext& step);
Status requantize(const StepContext& step, const PartBuffers& part);
// Writes out, and adds up the counts that the plan leaves to it.
Status combine(const StepContext& step);

// route and quantize as one kernel, for batches that one CTA routes. Leaves quantize's counts to
// combine.
Status route_and_quantize(const StepContext& step, int32_t* cleared);

// The part's share of the plan.
inline const PartPlan& plan_of(const StepContext& step, const PartBuffers& part) {
  return &part == &step.buffers.shared ? step.plan->shared : step.plan->routed;
}

}  // namespace nvfp4_moe::internal::cuda
