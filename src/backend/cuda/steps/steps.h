// The steps of the layer on a GPU, in the order they run. Each enqueues its kernels in step.stream
// by what step.plan says, and fails if a launch does.
#pragma once

#include "backend/cuda/run_plan.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cuda {

// cleared: (step.plan->route.cleared_counters) counters that are 0 after route, or null if there
// are none.
Status route(const StepContext& step, int32_t* cleared);
// on_input, between route and quantize: weighted_hidden of the tokens that have a row. Where a
// shared expert multiplies hidden itself, counts the tokens that only the weight makes nonfinite.
Status weigh(const StepContext& step);
// routed.hidden, which but on_input is shared.hidden too.
Status quantize(const StepContext& step);
// shared.hidden on_input.
Status quantize_shared_hidden(const StepContext& step);
Status requantize(const StepContext& step, const PartBuffers& part);
// out, and beside it what the plan says is not counted yet.
Status combine(const StepContext& step);

// route and quantize as one kernel, for batches that one CTA routes. Quantize's counts are left for
// combine.
Status route_and_quantize(const StepContext& step, int32_t* cleared);

// The part's share of the plan.
inline const PartPlan& plan_of(const StepContext& step, const PartBuffers& part) {
  return &part == &step.buffers.shared ? step.plan->shared : step.plan->routed;
}

}  // namespace nvfp4_moe::internal::cuda
