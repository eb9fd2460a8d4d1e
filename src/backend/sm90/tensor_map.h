// Tensor maps: what the copy engine has to know of an array whose boxes it brings into shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/status.h"

namespace nvfp4_moe::sm90 {

// Looks the driver's encoder up, once in a process; run relies on it.
Status find_tensor_map_encoder();

// lines (count, k) bf16 in boxes of box_lines x box_k, box_k * 2 = 128 bytes of a line in wgmma's swizzled order. Does
// not call the device. x: a multiple of 16 bytes; k: of 16.
CUtensorMap lines_map(const uint16_t* x, int64_t count, int64_t k, int box_lines, int box_k);

}  // namespace nvfp4_moe::sm90
