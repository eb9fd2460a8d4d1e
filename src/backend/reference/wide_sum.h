// The exact sum of a W4A8 dot product, and its single rounding.
//
// A 16-block gives D = sum (2w) q, at most 24384; E = 512 * weight scale, at most 229376; and an
// fp32 activation scale of 24 bits with an exponent of its own. D E times that significand is an
// integer below 2^57, but the exponents of blocks in one row may differ by 237 octaves, more than
// any accumulator holds. So terms are added in buckets of 32 octaves, each an Int128: a term
// shifted within its bucket stays below 2^88, and the 2^16 blocks of the longest K stay below
// 2^104.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "backend/reference/exact.h"

namespace nvfp4_moe::internal::reference {

struct WideSum {
  static constexpr int kBuckets = 8;
  // exponent of a significand's last bit: 2^-116 is 2^23 of them
  static constexpr int kLeastExponent = -139;
  // since D is doubled and E is 512 times its value
  static constexpr int kQuantumExponent = kLeastExponent - 10;
  Int128 bucket[kBuckets];  // the total is the sum of bucket[j] 2^(32 j + kQuantumExponent)
};

// An fp32 block scale as the factor of its terms and the bucket that they go to.
struct BlockFactor {
  int64_t factor = 0;  // below 2^55
  int bucket = 0;

  // 0 for values that no quantizer writes, such as the scale of a nonfinite row, whose sum is not
  // used.
  explicit BlockFactor(float scale) {
    if (!(scale >= 0x1p-116f && std::isfinite(scale))) return;
    // 0..237 for scales from 2^-116
    const int above = std::ilogb(scale) - 23 - WideSum::kLeastExponent;
    bucket = above / 32;
    factor =
        static_cast<int64_t>(std::ldexp(scale, -(above - above % 32) - WideSum::kLeastExponent));
  }
};

// sum * alpha, rounded once.
inline double scale_exact(const WideSum& sum, float alpha, const FloatFormat& format) {
  if (!std::isfinite(alpha)) return scale_exact(sum, 1.0f, format) * alpha;
  int exponent = 0;
  const auto significand =
      static_cast<uint64_t>(std::ldexp(std::frexp(std::fabs(alpha), &exponent), 24));

  constexpr int kLimbs = 12;  // of 32 bits: 104 + 7 * 32 + 24 bits at most
  std::array<uint32_t, kLimbs> limbs{};
  Int128 carry = 0;
  for (size_t j = 0; j < kLimbs; ++j) {
    carry += j < WideSum::kBuckets ? sum.bucket[j] : Int128{0};
    limbs[j] = static_cast<uint32_t>(carry);
    carry >>= 32;  // arithmetic shift: at the end 0 remains, or -1 for a negative sum
  }
  bool negative = carry < 0;
  if (negative) {
    uint64_t one = 1;
    for (uint32_t& limb : limbs) {
      one += static_cast<uint32_t>(~limb);
      limb = static_cast<uint32_t>(one);
      one >>= 32;
    }
  }
  negative = negative != std::signbit(alpha);
  uint64_t over = 0;
  for (uint32_t& limb : limbs) {
    over += limb * significand;
    limb = static_cast<uint32_t>(over);
    over >>= 32;
  }

  // The three highest limbs have more bits than any format. Of the lower ones, it only matters
  // whether any is nonzero.
  size_t top = kLimbs - 1;
  while (top > 2 && limbs[top] == 0) --top;
  Int128 head = 0;
  for (size_t j = top + 1; j-- > top - 2;) head = head << 32 | limbs[j];
  bool below = false;
  for (size_t j = 0; j < top - 2; ++j) below = below || limbs[j] != 0;
  head = head << 1 | (below ? 1 : 0);
  return round_exact(negative ? -head : head,
                     WideSum::kQuantumExponent + 32 * static_cast<int>(top - 2) - 1 + exponent - 24,
                     format);
}

}  // namespace nvfp4_moe::internal::reference
