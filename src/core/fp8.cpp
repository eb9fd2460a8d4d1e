#include "core/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"
#include "core/fp8_histogram.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int kValidScales = 127;  // valid block scales 0x00..0x7E

double unrounded(uint8_t code, uint8_t block_scale, int shift) {
  return std::ldexp(
      static_cast<double>(e2m1_to_float(code)) * static_cast<double>(e4m3_to_float(block_scale)),
      -shift);
}

// For each block scale: bit m is set if codes of magnitude m (0..7) are rounded.
std::array<uint8_t, kValidScales> inexact_magnitudes(int shift) {
  std::array<uint8_t, kValidScales> masks{};
  for (int byte = 0; byte < kValidScales; ++byte)
    for (uint8_t magnitude = 0; magnitude < 8; ++magnitude) {
      const auto scale = static_cast<uint8_t>(byte);
      const auto rounded = static_cast<double>(e4m3_to_float(fp8_weight(magnitude, scale, shift)));
      if (rounded != unrounded(magnitude, scale, shift))
        masks[scale] |= static_cast<uint8_t>(1 << magnitude);
    }
  return masks;
}

constexpr uint64_t kEach = 0x1111111111111111u;  // the low bit of every nibble
constexpr int64_t kMostBlocks = 15;              // the most blocks that a nibble can count

// The set of rounded codes as a polynomial of a code's three magnitude bits over GF(2), for 16
// codes at once. Coefficient i is in every nibble or in none, and belongs to the product of the
// bits that are set in i. Codes 0 are exact, so there is no coefficient 0.
using Polynomial = std::array<uint64_t, 8>;

std::array<Polynomial, kValidScales> inexact_polynomials(int shift) {
  const auto masks = inexact_magnitudes(shift);
  std::array<Polynomial, kValidScales> polynomials{};
  for (size_t scale = 0; scale < masks.size(); ++scale)
    for (unsigned i = 1; i < 8; ++i) {
      int sum = 0;  // over all magnitudes whose bits are a subset of those of i
      for (unsigned magnitude = 1; magnitude < 8; ++magnitude)
        if ((magnitude & ~i) == 0) sum ^= masks[scale] >> magnitude & 1;
      polynomials[scale][i] = sum == 0 ? 0 : kEach;
    }
  return polynomials;
}

// The low bit of each nibble is set if that code is rounded. No branch depends on the codes.
uint64_t inexact_codes(uint64_t codes, const Polynomial& c) {
  const uint64_t b0 = codes, b1 = codes >> 1, b2 = codes >> 2;
  const uint64_t without_b2 = (c[1] & b0) ^ (c[2] & b1) ^ (c[3] & b0 & b1);
  return without_b2 ^ (b2 & (c[4] ^ (c[5] & b0) ^ (c[6] & b1) ^ (c[7] & b0 & b1)));
}

}  // namespace

int fp8_weight_shift(uint8_t largest) {
  if (largest == 0) return 0;
  const double top = double{kE2m1Max} * static_cast<double>(e4m3_to_float(largest));
  int shift = kFp8LeastShift;
  while (std::ldexp(top, -shift) > double{kE4m3Max}) ++shift;
  return shift;
}

uint8_t fp8_weight(uint8_t code, uint8_t block_scale, int shift) {
  return e4m3_from_double(unrounded(code, block_scale, shift));
}

Fp8Weights measure_fp8_weights(const Nvfp4View& matrix) {
  const int64_t blocks = matrix.cols / kBlockElems;
  uint8_t largest = 0;  // among valid bytes the larger number is the larger scale
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const uint8_t* scales = matrix.row_scales(r);
    for (int64_t b = 0; b < blocks; ++b) largest = std::max(largest, scales[b]);
  }
  Fp8Weights result{.shift = fp8_weight_shift(largest), .inexact = 0};
  const auto polynomials = inexact_polynomials(result.shift);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const uint8_t *codes = matrix.row_codes(r), *scales = matrix.row_scales(r);
    for (int64_t first = 0; first < blocks; first += kMostBlocks) {
      uint64_t counts = 0;  // one count per nibble
      for (int64_t b = first; b < std::min(first + kMostBlocks, blocks); ++b) {
        uint64_t word = 0;
        std::memcpy(&word, codes + b * (kBlockElems / 2), sizeof(word));
        counts += inexact_codes(word, polynomials[scales[b]]);
      }
      constexpr uint64_t kLowNibbles = 0x0F0F0F0F0F0F0F0Fu, kBytes = 0x0101010101010101u;
      result.inexact +=
          ((counts & kLowNibbles) + (counts >> 4 & kLowNibbles)) * kBytes >> 56;  // at most 240
    }
  }
  return result;
}

Fp8Weights read_fp8_weights(const Fp8Histogram& codes) {
  uint8_t largest = 0;
  for (uint8_t scale = 0; scale < kValidScales; ++scale)
    if (std::ranges::any_of(codes[scale], [](uint64_t count) { return count != 0; }))
      largest = scale;
  Fp8Weights result{.shift = fp8_weight_shift(largest), .inexact = 0};
  const auto masks = inexact_magnitudes(result.shift);
  for (size_t scale = 0; scale <= largest; ++scale)
    for (size_t magnitude = 0; magnitude < codes[scale].size(); ++magnitude)
      if ((masks[scale] >> magnitude & 1) != 0) result.inexact += codes[scale][magnitude];
  return result;
}

}  // namespace nvfp4_moe::internal
