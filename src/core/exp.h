// e^x of a float with the same bits on every host and device. It uses only double operations of
// IEEE 754, in this order, and no compiler of this library contracts them. Within 2^-50 of e^x
// before its one rounding to float.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal {

// e^x before its rounding, for |x| <= 708.
NVFP4_MOE_HOST_DEVICE inline double exp_unrounded(double x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 2^52 leaves the nearest integer in a double's
  // low bits. The first part of ln 2 has 32 significant bits, so n times it is exact.
  constexpr double kShift = 0x1.8p52, kLog2e = 0x1.71547652b82fep0;
  constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  const double n = (x * kLog2e + kShift) - kShift;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  // Taylor's series to r^13 / 13!.
  double sum = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  const uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(n) + 1023)
                        << 52;  // 2^n, a normal double
  double power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return sum * power;
}

NVFP4_MOE_HOST_DEVICE inline float exp_same_everywhere(float x) {
  // Without branches, so that a thread can compute several at once. The largest float's logarithm
  // is 88.73, so e^89 becomes infinity; e^-104 is below half of the least float and becomes 0.
  const float bounded = x > -104.0f ? (x < 89.0f ? x : 89.0f) : -104.0f;
  const float result = static_cast<float>(exp_unrounded(static_cast<double>(bounded)));
  return x != x ? x : result;
}

}  // namespace nvfp4_moe::internal
