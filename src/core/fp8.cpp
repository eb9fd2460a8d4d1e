#include "core/fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"
#include "core/fp8_histogram.h"

namespace nvfp4_moe {
namespace {

constexpr int kScaleBytes = 127;  // valid block scales 0x00..0x7E

double unrounded(uint8_t code, uint8_t block_scale, int shift) {
  return std::ldexp(static_cast<double>(e2m1_to_float(code)) * static_cast<double>(e4m3_to_float(block_scale)), -shift);
}

// Of each block scale: bit m where codes of magnitude m (0..7) are rounded.
std::array<uint8_t, kScaleBytes> inexact_magnitudes(int shift) {
  std::array<uint8_t, kScaleBytes> masks{};
  for (int byte = 0; byte < kScaleBytes; ++byte)
    for (uint8_t magnitude = 0; magnitude < 8; ++magnitude) {
      const auto scale = static_cast<uint8_t>(byte);
      const auto rounded = static_cast<double>(e4m3_to_float(fp8_weight(magnitude, scale, shift)));
      if (rounded != unrounded(magnitude, scale, shift)) masks[scale] |= static_cast<uint8_t>(1 << magnitude);
    }
  return masks;
}

// How many of the 16 codes in `word` have that magnitude.
int count_magnitude(uint64_t word, int magnitude) {
  constexpr uint64_t kEach = 0x1111111111111111u;
  // The three low bits of a nibble are 0 where it matches; adding 7 carries into its fourth bit where it does not.
  const uint64_t other = (word ^ (kEach * static_cast<unsigned>(magnitude))) & (kEach * 7);
  return kBlockElems - std::popcount((other + kEach * 7) & (kEach * 8));
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
  uint8_t largest = 0;  // of valid bytes the larger number is the larger scale
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const uint8_t* scales = matrix.row_scales(r);
    for (int64_t b = 0; b < blocks; ++b) largest = std::max(largest, scales[b]);
  }
  Fp8Weights result{.shift = fp8_weight_shift(largest), .inexact = 0};
  const auto masks = inexact_magnitudes(result.shift);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const uint8_t *codes = matrix.row_codes(r), *scales = matrix.row_scales(r);
    for (int64_t b = 0; b < blocks; ++b) {
      uint64_t word = 0;
      std::memcpy(&word, codes + b * (kBlockElems / 2), sizeof(word));
      for (unsigned mask = masks[scales[b]]; mask != 0; mask &= mask - 1)
        result.inexact += static_cast<uint64_t>(count_magnitude(word, std::countr_zero(mask)));
    }
  }
  return result;
}

Fp8Weights read_fp8_weights(const Fp8Histogram& codes) {
  uint8_t largest = 0;
  for (uint8_t scale = 0; scale < kScaleBytes; ++scale)
    if (std::ranges::any_of(codes[scale], [](uint64_t count) { return count != 0; })) largest = scale;
  Fp8Weights result{.shift = fp8_weight_shift(largest), .inexact = 0};
  const auto masks = inexact_magnitudes(result.shift);
  for (size_t scale = 0; scale <= largest; ++scale)
    for (size_t magnitude = 0; magnitude < codes[scale].size(); ++magnitude)
      if ((masks[scale] >> magnitude & 1) != 0) result.inexact += codes[scale][magnitude];
  return result;
}

}  // namespace nvfp4_moe
