#include "backend/cuda/steps.h"
#include "backend/sm90/steps.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {

void route(const HostCall& call) {
  cuda::route_in_tiles(call, kVariants[routed_variant(call.weights.config, call.batch.tokens)].lines, true);
}

}  // namespace nvfp4_moe::sm90
