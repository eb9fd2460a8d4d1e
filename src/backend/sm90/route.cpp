#include "backend/cuda/steps/steps.h"
#include "backend/sm90/scratch.h"
#include "backend/sm90/steps.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {

cuda::Tiling tiling(const HostCall& call) {
  const MoeConfig& config = call.weights.config;
  const Scratch scratch(config, call.weights.range, call.batch.tokens, call.scratch);
  const Variant& variant = kVariants[routed_variant(config, call.weights.range, call.batch.tokens)];
  return {variant.lines, true, scratch.arrivals, kMostBlocks, flags_rows(config, variant)};
}
void route(const HostCall& call) { cuda::route_in_tiles(call, tiling(call)); }

}  // namespace nvfp4_moe::sm90
