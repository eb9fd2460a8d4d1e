// Tiles for tcgen05, as written by the shared packer.
#pragma once

#include "backend/cuda/pack/pack.h"

namespace nvfp4_moe::internal::sm100 {

extern const cuda::TileFormat kFp4Tiles;  // weight_tile.h

}  // namespace nvfp4_moe::internal::sm100
