// Packs experts and unpacks them. Host rows go through staging memory, a few tiles at a time; it
// exists only while a layer packs. Rows on the layer's device are read directly.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::internal::cuda {

template <class Byte>
struct DeviceRows;  // pack/pack_rows.cuh

// The order of codes and scales in a layer's tiles, given by the kernels that write and read them.
// A tile always has kTileBytes. vecs: 16-byte vectors of codes, one per thread. Both only enqueue.
struct TileFormat {
  Status (*pack)(const DeviceRows<const uint8_t>& rows, int64_t vecs, int64_t k_tiles,
                 uint8_t* tiles, void* stream);
  Status (*unpack)(const DeviceRows<uint8_t>& rows, int64_t vecs, int64_t k_tiles,
                   const uint8_t* tiles, void* stream);
  // including those of blocks with scale 0; if false, these go to weights.zero_scale_codes
  bool holds_all_codes;
};
extern const TileFormat kBf16Tiles;  // packed_tile.h

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range);
// Waits until the expert is packed; for a source on the device, in source.stream.
Status pack_expert(const TileFormat& format, PackedWeights& weights, int64_t local_expert,
                   const ExpertSource& source);
// Packs one matrix of a linear into its tiles. Codes of blocks with scale 0 may become 0.
// fp8_shift: of its weights under fp8.
Status pack_matrix(const TileFormat& format, int device, const Nvfp4View& source, int32_t fp8_shift,
                   std::byte* tiles);
Status unpack_expert(const TileFormat& format, const PackedWeights& weights, int64_t local_expert,
                     const LentStaging& lent, ExpertBuffers& out);

// The same for tiles for bf16 products.
inline Status pack_expert(PackedWeights& weights, int64_t local_expert,
                          const ExpertSource& source) {
  return pack_expert(kBf16Tiles, weights, local_expert, source);
}
inline Status unpack_expert(const PackedWeights& weights, int64_t local_expert,
                            const LentStaging& lent, ExpertBuffers& out) {
  return unpack_expert(kBf16Tiles, weights, local_expert, lent, out);
}

}  // namespace nvfp4_moe::internal::cuda
