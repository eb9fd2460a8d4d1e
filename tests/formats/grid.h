// The oracle of the format tests: a number format as the plain list of its magnitudes, and rounding
// by comparison.
//
// round() finds the neighbours of a magnitude in the list and compares it with their midpoint;
// round_quotient() compares a numerator with midpoint * denominator instead of dividing. Both
// comparisons are exact in double for the significands used here (at most 31 bits), so nothing is
// rounded before the decision. Shares no code with src/core.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace nvfp4_moe::internal::test {

struct Grid {
  std::vector<double> magnitudes;  // ascending; the index is the bit pattern without its sign
  // if false: values past the midpoint to `overflow` round to Inf, which has the next index as its
  // pattern
  bool saturates = true;
  double overflow = 0;

  size_t max_index() const { return magnitudes.size() - 1; }

  // Boundary between index i and i + 1; at it the even index wins.
  double midpoint(size_t i) const {
    return (magnitudes[i] + (i == max_index() ? overflow : magnitudes[i + 1])) / 2;
  }

  // The index for numerator / denominator, both >= 0, denominator > 0.
  size_t round_quotient(double numerator, double denominator) const {
    const size_t boundaries = saturates ? max_index() : max_index() + 1;
    size_t low = 0;
    size_t high = boundaries;  // the answer is the number of boundaries passed
    while (low < high) {
      const size_t i = (low + high) / 2;
      const double boundary = midpoint(i) * denominator;
      const bool passed = numerator > boundary || (numerator == boundary && i % 2 == 1);
      (passed ? low : high) = passed ? i + 1 : i;
    }
    return low;
  }
  size_t round(double magnitude) const { return round_quotient(magnitude, 1.0); }
};

// A binary format with `exponent_bits`, `mantissa_bits` and exponent bias `bias`, patterns
// 0..patterns-1 finite.
inline Grid make_grid(int mantissa_bits, int bias, unsigned patterns) {
  Grid grid;
  for (unsigned p = 0; p < patterns; ++p) {
    const int exponent = static_cast<int>(p >> mantissa_bits);
    const unsigned mantissa = p & ((1u << mantissa_bits) - 1);
    const double significand = mantissa + (exponent > 0 ? std::ldexp(1.0, mantissa_bits) : 0.0);
    grid.magnitudes.push_back(
        std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits));
  }
  const double last = grid.magnitudes.back();
  grid.overflow = last + (last - grid.magnitudes[grid.magnitudes.size() - 2]);
  return grid;
}

inline const Grid& e2m1_grid() {
  static const Grid grid = make_grid(1, 1, 8);
  return grid;
}
inline const Grid& e4m3_grid() {
  static const Grid grid = make_grid(3, 7, 127);
  return grid;
}
inline const Grid& bf16_grid() {
  static const Grid grid = [] {
    Grid g = make_grid(7, 127, 0x7F80);
    g.saturates = false;
    return g;
  }();
  return grid;
}
inline const Grid& fp16_grid() {
  static const Grid grid = [] {
    Grid g = make_grid(10, 15, 0x7C00);
    g.saturates = false;
    return g;
  }();
  return grid;
}

}  // namespace nvfp4_moe::internal::test
