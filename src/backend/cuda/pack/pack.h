// Experts into the packed layout and back: rows of the host a few tiles at a time through staging
// memory, which exists only for as long as a layer packs; rows on the layer's device from where
// they lie.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::internal::cuda {

template <class Byte>
struct DeviceRows;  // pack/pack_rows.cuh

// The order that a layer's tiles keep codes and scales in, by the kernels that write and read it; a
// tile has kTileBytes whatever the order. vecs: of 16 bytes of codes, a thread each. Both only
// enqueue.
struct TileFormat {
  Status (*pack)(const DeviceRows<const uint8_t>& rows, int64_t vecs, int64_t k_tiles,
                 uint8_t* tiles, void* stream);
  Status (*unpack)(const DeviceRows<uint8_t>& rows, int64_t vecs, int64_t k_tiles,
                   const uint8_t* tiles, void* stream);
  bool holds_all_codes;  // also those of blocks whose scale is 0; else they go to
                         // weights.zero_scale_codes
};
extern const TileFormat kBf16Tiles;  // packed_tile.h

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range);
// Waits until the expert is packed: in source.stream for a source on the device.
Status pack_expert(const TileFormat& format, PackedWeights& weights, int64_t local_expert,
                   const ExpertSource& source);
// One matrix of a linear into its tiles; codes of blocks whose scale is 0 may become 0. fp8_shift:
// of its weights under fp8.
Status pack_matrix(const TileFormat& format, int device, const Nvfp4View& source, int32_t fp8_shift,
                   std::byte* tiles);
Status unpack_expert(const TileFormat& format, const PackedWeights& weights, int64_t local_expert,
                     ExpertBuffers& out);

// The same in tiles for bf16 products.
inline Status pack_expert(PackedWeights& weights, int64_t local_expert,
                          const ExpertSource& source) {
  return pack_expert(kBf16Tiles, weights, local_expert, source);
}
inline Status unpack_expert(const PackedWeights& weights, int64_t local_expert,
                            ExpertBuffers& out) {
  return unpack_expert(kBf16Tiles, weights, local_expert, out);
}

}  // namespace nvfp4_moe::internal::cuda
