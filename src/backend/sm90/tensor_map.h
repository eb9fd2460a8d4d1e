// Tensor maps: TMA's description of an array whose tiles it copies into shared memory.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace nvfp4_moe::internal::sm90 {

// Looks up the driver's encoder, once per process; run relies on it.
Status find_tensor_map_encoder();

// Rows x (count, row_bytes) in tiles of tile_rows x tile_bytes, with tile_bytes = 128, in the
// swizzle that wgmma reads. The element type does not matter: bytes beyond the rows are
// zero-filled. Does not call the device. x and row_bytes: multiples of 16.
Result<CUtensorMap> rows_map(const std::byte* x, int64_t count, int64_t row_bytes, int tile_rows,
                             int tile_bytes);

}  // namespace nvfp4_moe::internal::sm90
