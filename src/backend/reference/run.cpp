// The layer, as its steps.
#include "backend/reference/steps.h"

namespace nvfp4_moe::reference {

Status run(const PackedWeights& weights, const Plan&, const Batch& batch, const Workspace& workspace,
           const RunContext& context) {
  const HostBuffers buffers = host_buffers(weights.config, weights.range, workspace);
  const HostCall call{weights, batch, buffers, *context.executor};
  route(call);
  quantize(call);
  for (const HostPart* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    gemm1_swiglu(call, *part);
    requantize(call, *part);
    gemm2(call, *part);
  }
  combine(call);
  return {};
}

}  // namespace nvfp4_moe::reference
