// Experts into the packed layout and back, a few tiles at a time through the staging memory of the layer.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::cuda {

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range);
// Waits until the expert is packed. Codes of blocks whose scale is 0 go to weights.zero_scale_codes.
Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source);
// One matrix of a linear into its tiles; codes of blocks whose scale is 0 become 0.
Status pack_matrix(int device, const Nvfp4View& source, std::byte* tiles);
Status unpack_expert(const PackedWeights& weights, int64_t local_expert, ExpertBuffers& out);

}  // namespace nvfp4_moe::cuda
