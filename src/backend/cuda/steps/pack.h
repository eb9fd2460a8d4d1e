// Experts into the packed layout and back: rows of the host a few tiles at a time through staging memory, which exists
// only for as long as a layer packs; rows on the layer's device from where they lie.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::cuda {

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range);
// Waits until the expert is packed: in source.stream for a source on the device. Codes of blocks whose scale is 0 go to weights.zero_scale_codes.
Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source);
// One matrix of a linear into its tiles; codes of blocks whose scale is 0 become 0.
Status pack_matrix(int device, const Nvfp4View& source, std::byte* tiles);
Status unpack_expert(const PackedWeights& weights, int64_t local_expert, ExpertBuffers& out);

}  // namespace nvfp4_moe::cuda
