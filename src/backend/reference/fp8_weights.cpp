#include "backend/reference/fp8_weights.h"

#include <algorithm>
#include <cmath>

#include "backend/reference/formats.h"

namespace nvfp4_moe::internal::reference {
namespace {

constexpr int kShifts = kFp8MostShift - kFp8LeastShift + 1;

// e2m1 * e4m3 * 2^-shift in multiples of 2^-9, before rounding. Exact.
double unrounded(size_t byte, size_t code, int shift) {
  return std::ldexp(kE2m1Doubled[code] * static_cast<double>(kE4m3Times512[byte]), -1 - shift);
}

Fp8WeightTable make_table(int shift) {
  Fp8WeightTable table{};
  for (size_t byte = 0; byte < table.size(); ++byte)
    for (size_t code = 0; code < 16; ++code) {
      const double multiple = unrounded(byte, code, shift);
      // Values such as 6 * 448 * 2^15 exceed the format, but no matrix with this shift has such a
      // block scale.
      table[byte][code] =
          std::copysign(kE4m3Times512[round_to_e4m3(std::fabs(multiple) / 512)], multiple);
    }
  return table;
}

}  // namespace

const Fp8WeightTable& fp8_weight_table(int shift) {
  static const auto tables = [] {
    std::array<Fp8WeightTable, kShifts> all{};
    for (int i = 0; i < kShifts; ++i) all[static_cast<size_t>(i)] = make_table(kFp8LeastShift + i);
    return all;
  }();
  return tables[static_cast<size_t>(shift - kFp8LeastShift)];
}

Fp8Weights define_fp8_weights(const Nvfp4View& matrix) {
  double largest = 0;
  for (int64_t r = 0; r < matrix.rows; ++r)
    for (int64_t b = 0; b < matrix.cols / 16; ++b)
      largest = std::max(largest, kE4m3Magnitudes[matrix.row_scales(r)[b]]);
  Fp8Weights weights;
  // The smallest sufficient shift, searched upwards from an insufficient one; 0 for a matrix of
  // zeros.
  if (largest > 0)
    for (weights.shift = kFp8LeastShift; std::ldexp(6 * largest, -weights.shift) > 448;)
      ++weights.shift;
  const Fp8WeightTable& table = fp8_weight_table(weights.shift);
  for (int64_t r = 0; r < matrix.rows; ++r)
    for (int64_t k = 0; k < matrix.cols; ++k) {
      const size_t code = static_cast<size_t>(matrix.row_codes(r)[k / 2] >> (k % 2 * 4) & 15);
      const size_t byte = matrix.row_scales(r)[k / 16];
      weights.inexact += table[byte][code] != unrounded(byte, code, weights.shift);
    }
  return weights;
}

}  // namespace nvfp4_moe::internal::reference
