// Tensor maps: what TMA has to know of an array whose tiles it copies into shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/status.h"

namespace nvfp4_moe::sm90 {

// Looks the driver's encoder up, once in a process; run relies on it.
Status find_tensor_map_encoder();

// Rows x (count, k) bf16 in tiles of tile_rows x tile_k; tile_k * 2 = 128 bytes, in the swizzle that wgmma reads. Does not
// call the device. x: a multiple of 16 bytes; k: of 16.
Result<CUtensorMap> rows_map(const uint16_t* x, int64_t count, int64_t k, int tile_rows, int tile_k);

}  // namespace nvfp4_moe::sm90
