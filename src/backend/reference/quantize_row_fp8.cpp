// The definition of fp8 rows (docs/explanation/numerics.md, section 3), s = 2^e the row's scale:
//
//   x8 = e4m3(x 2^-e), to nearest even, saturating at 448
//   dynamic_token: s = the smallest power of two with amax <= 448 s, 1 for a row of zeros,
//                  at least 2^-126
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/reference/formats.h"
#include "backend/reference/quantize_row.h"

namespace nvfp4_moe::internal::reference {
void quantize_row_fp8(const void* x, DType dtype, int64_t first, int64_t cols,
                      const ScalePolicy& policy, const ActivationBuffers& out, int64_t row,
                      RowCounts& counts) {
  uint8_t* codes = out.fp8 + row * cols;
  const auto [amax, finite] = range_of(x, dtype, first, cols);
  out.nonfinite[row] = finite ? 0 : 1;
  if (!finite) {
    std::fill_n(codes, cols, uint8_t{0});
    out.row_scale[row] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const int exponent = policy.kind == ScalePolicy::kPowerOfTwo ? std::ilogb(policy.scale)
                                                               : dynamic_exponent(amax, 448.0);
  out.row_scale[row] = static_cast<float>(std::ldexp(1.0, exponent));
  for (int64_t b = 0; b < cols; b += kBlock) {
    bool all_zero = true, rounded_to_zero = true, saturated = false;
    for (int64_t i = b; i < b + kBlock; ++i) {
      const double quotient = std::ldexp(load(x, dtype, first + i), -exponent);
      codes[i] = round_to_signed_e4m3(quotient);
      all_zero = all_zero && quotient == 0;
      rounded_to_zero = rounded_to_zero && (codes[i] & 127) == 0;
      saturated = saturated || std::fabs(quotient) > 448;
    }
    counts.blocks += 1;
    counts.saturated += saturated;
    counts.zeroed += rounded_to_zero && !all_zero;
  }
}

}  // namespace nvfp4_moe::internal::reference
