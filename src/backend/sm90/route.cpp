#include "backend/cuda/steps/steps.h"
#include "backend/sm90/scratch.h"
#include "backend/sm90/steps.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {

cuda::Tiling tiling(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const Scratch scratch(step);
  const Variant& variant = kVariants[routed_variant(config, step.weights.range, step.batch.tokens)];
  return {variant.lines, true, scratch.arrivals, kMostBlocks, flags_rows(config, variant)};
}
void route(const StepContext& step) { cuda::route_in_tiles(step, tiling(step)); }

}  // namespace nvfp4_moe::sm90
