// The definition of int8_block (docs/explanation/format.md, "INT8 activations by block"), A a
// block's amax:
//
//   s = max(fl32(A / 127), 2^-116),   code = RNE(fl32(x / s))
//
// No code is outside +-127: A / s is at most 127 (1 + 2^-24) before it is rounded.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/reference/formats.h"
#include "backend/reference/quantize_row.h"

namespace nvfp4_moe::internal::reference {
namespace {

constexpr double kLeastScale = 0x1p-116;

}  // namespace

void quantize_row_int8(const void* x, DType dtype, int64_t first, int64_t cols,
                       const ActivationBuffers& out, int64_t row, RowCounts& counts) {
  int8_t* codes = out.int8_codes + row * cols;
  float* scales = out.int8_scales + row * (cols / kBlock);
  const bool finite = range_of(x, dtype, first, cols).finite;
  out.nonfinite[row] = finite ? 0 : 1;
  if (!finite) {
    std::fill_n(codes, cols, int8_t{0});
    std::fill_n(scales, cols / kBlock, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    double amax = 0;
    for (int64_t i = 0; i < kBlock; ++i)
      amax = std::max(amax, std::fabs(load(x, dtype, first + b * kBlock + i)));
    const double scale = std::max(round_to(kFp32, amax / 127), kLeastScale);
    scales[b] = static_cast<float>(scale);
    bool zero = true;
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      // A quotient of two floats that is first rounded to double still rounds to the nearest float:
      // 53 >= 2 * 24 + 2.
      codes[i] =
          static_cast<int8_t>(std::nearbyint(round_to(kFp32, load(x, dtype, first + i) / scale)));
      zero = zero && codes[i] == 0;
    }
    counts.blocks += 1;
    counts.zeroed += zero && amax > 0;
  }
}

}  // namespace nvfp4_moe::internal::reference
