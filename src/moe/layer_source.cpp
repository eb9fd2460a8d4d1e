// A checkpoint's layer as the experts that a MoeLayer packs.
#include <string>

#include "moe/layer.h"

namespace nvfp4_moe {

Result<LayerSource> layer_source(const Checkpoint& checkpoint, int64_t layer, const IntermediateSlice& slice) {
  LayerSource source;
  NVFP4_MOE_ASSIGN(source.scales, checkpoint.layer_scales(layer));
  NVFP4_MOE_ASSIGN(source.declared, checkpoint.declared_activations(layer));
  NVFP4_MOE_ASSIGN(const MoeOptions options, checkpoint.layer_options(layer));
  // The shared expert is cut like the routed ones: the same share of its own intermediate size.
  IntermediateSlice shared_slice;
  if (slice.count > 0 && options.shared_intermediate_size > 0) {
    const int64_t routed = options.intermediate_size;
    const int64_t shared = options.shared_intermediate_size;
    if (slice.first < 0 || slice.first > routed || slice.count > routed - slice.first)
      return invalid_argument("intermediate slice: expected a part of [0, " + std::to_string(routed) + "), got first " +
                              std::to_string(slice.first) + " count " + std::to_string(slice.count));
    // Exact without overflow: both sizes come from tensors that exist.
    if (slice.first * shared % (routed * 16) != 0 || slice.count * shared % (routed * 16) != 0)
      return invalid_argument("intermediate slice: expected one that cuts the shared expert's " +
                              std::to_string(shared) + " at multiples of 16, got first " + std::to_string(slice.first) +
                              " count " + std::to_string(slice.count) + " of " + std::to_string(routed));
    shared_slice = {slice.first * shared / routed, slice.count * shared / routed};
  }
  source.name = "layer " + std::to_string(layer);
  source.expert = [&checkpoint, layer, slice](int64_t expert) { return checkpoint.expert(layer, expert, slice); };
  source.shared_expert = [&checkpoint, layer, shared_slice] { return checkpoint.shared_expert(layer, shared_slice); };
  return source;
}

}  // namespace nvfp4_moe
