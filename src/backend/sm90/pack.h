// Packing into the tiles of fp8_tile.h.
#pragma once

#include "backend/cuda/pack/pack.h"

namespace nvfp4_moe::internal::sm90 {

extern const cuda::TileFormat kFp8Tiles;

}  // namespace nvfp4_moe::internal::sm90
