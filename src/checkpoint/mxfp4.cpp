#include "checkpoint/mxfp4.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int kBias = 127;           // of E8M0
constexpr int kTopExponent = 8;      // 2^8 is E4M3's largest power of two
constexpr int kBottomExponent = -9;  // 2^-9 its smallest
constexpr int kExactSpread = kTopExponent - kBottomExponent;

bool any_nonzero(const uint8_t* codes, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if ((codes[i] & 0x77) != 0) return true;  // modulo -0
  }
  return false;
}

// The E4M3 byte of 2^e, e in [-9, 8].
uint8_t power_byte(int e) { return static_cast<uint8_t>(e >= -6 ? (e + 7) << 3 : 1 << (e + 9)); }

}  // namespace

Result<Mxfp4Cast> cast_mxfp4(const uint8_t* codes, int64_t codes_stride, const uint8_t* scales,
                             int64_t scales_stride, int phase, int64_t rows, int64_t cols,
                             uint8_t* out_codes, uint8_t* out_scales) {
  const int64_t blocks = cols / 16;
  const auto scale_at = [&](int64_t r, int64_t b) {
    return int{scales[r * scales_stride + (b + phase) / 2]};
  };
  const auto codes_at = [&](int64_t r, int64_t b) { return codes + r * codes_stride + b * 8; };
  int low = 255;
  int high = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int byte = scale_at(r, b);
      if (byte == 255)
        return bad_input(
            fmt::format("row {} block {}: E8M0 scale is NaN (0xFF)", r, (b + phase) / 2));
      low = std::min(low, byte);
      high = std::max(high, byte);
    }
  }
  if (high - low > kExactSpread) {  // find the extremes over nonzero codes only
    high = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < blocks; ++b) {
        if (scale_at(r, b) > high && any_nonzero(codes_at(r, b), 8)) high = scale_at(r, b);
      }
    }
  }
  const int m = std::max(high - kBias - kTopExponent, -126);
  Mxfp4Cast out;
  out.tensor_scale = std::ldexp(1.0f, m);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int e = scale_at(r, b) - kBias - m;
      const uint8_t* from = codes_at(r, b);
      uint8_t* to = out_codes + r * (cols / 2) + b * 8;
      uint8_t& to_scale = out_scales[r * blocks + b];
      if (e >= kBottomExponent && e <= kTopExponent) {
        std::memcpy(to, from, 8);
        to_scale = power_byte(e);
        continue;
      }
      std::memset(to, 0, 8);
      to_scale = 0;
      if (e > kTopExponent || !any_nonzero(from, 8)) continue;  // above the top only zeros are left
      ++out.rounded_blocks;
      const double factor = std::ldexp(1.0, e - kBottomExponent);
      const auto rounded = [&](uint8_t code) {
        return e2m1_from_double(static_cast<double>(e2m1_to_float(code)) * factor);
      };
      for (int i = 0; i < 8; ++i)
        to[i] = pack_codes(rounded(low_code(from[i])), rounded(high_code(from[i])));
      if (any_nonzero(to, 8)) {
        to_scale = power_byte(kBottomExponent);
      } else {
        std::memset(to, 0, 8);
      }
    }
  }
  return out;
}

}  // namespace nvfp4_moe::internal
