// NVFP4 back to wider types, and NVFP4 to FP8, for layers that another kernel runs.
//
// value = e2m1(code) * e4m3(block_scale) * tensor_scale, computed exactly in double and rounded
// once to the output.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/nvfp4_view.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// out: (rows, cols) row-major, BF16, F16 or F32.
Status dequantize(const Nvfp4View& view, DType out_dtype, void* out);

struct Fp8Scaling {
  // 0 x 0: one scale for the whole tensor; 128 x 128: DeepSeek's block scaling
  int64_t block_rows = 0;
  int64_t block_cols = 0;
};
// Converts to FP8: value ~= e4m3(out) * scale. out: (rows, cols) E4M3 bytes. scales:
// ceil(rows/block_rows) * ceil(cols/block_cols) floats, row-major over blocks, or one for the whole
// tensor. scale = fl32(amax/448), or 1 for a block of zeros. Each byte is rounded once from the
// exact quotient.
Status convert_to_fp8(const Nvfp4View& view, const Fp8Scaling& scaling, uint8_t* out,
                      float* scales);

}  // namespace nvfp4_moe::internal
