// The layer, as its steps.
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {

Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch, std::byte* workspace,
           const RunContext& context) {
  Arena arena(workspace, plan.limits.guard_bytes);
  const LayerBuffers buffers = layer_buffers(weights.config, weights.range, batch.tokens, arena);
  const StepContext step{weights, batch, buffers, *context.executor};
  route(step);
  quantize(step);
  for (const PartBuffers* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    gemm1_swiglu(step, *part);
    requantize(step, *part);
    gemm2(step, *part);
  }
  combine(step);
  return {};
}

}  // namespace nvfp4_moe::internal::reference
