// The definitions of the activation quantizers (docs/explanation/numerics.md, "Activation scales").
//
//   power of two s = 2^k:  byte = e4m3(fl32(A 2^-k c)), c = fl32(1/6);
//                          code = e2m1(fl32(x 2^-k / v))
//   dynamic_token:         s = the smallest power of two with amax <= 2688 s, 1 for a row of zeros,
//                          at least 2^-126
//   vllm_order: G = fl32(1/s); byte = e4m3(fl32(G fl32(A c)));
//                          code = e2m1(fl32(x rcp(fl32(v rcp(G)))))
//
// A is the block's amax, v the value of its scale byte; v = 0 makes all codes 0. For bf16 and fp16
// elements the first form gives the same result as rounding the exact quotients. For fp32 elements,
// the named fp32 roundings are the definition.
#include "backend/reference/quantize_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/reference/formats.h"

namespace nvfp4_moe::internal::reference {
namespace {

constexpr float kSixth = 1.0f / 6.0f;  // 0x3E2AAAAB
static_assert(std::bit_cast<uint32_t>(kSixth) == 0x3E2AAAABu);

struct PowerOfTwo {
  int exponent;
  float scale_of(float amax) const {
    return static_cast<float>(std::ldexp(double{amax}, -exponent)) * kSixth;
  }
  float quotient(float x, float v) const {
    return static_cast<float>(std::ldexp(double{x}, -exponent)) / v;
  }
};

struct VllmOrder {
  float encode;  // G
  explicit VllmOrder(float scale) : encode(1.0f / scale) {}
  float scale_of(float amax) const { return encode * (amax * kSixth); }
  float quotient(float x, float v) const { return x * (1.0f / (v * (1.0f / encode))); }
};

template <class Rule>
void quantize_block(const float (&x)[kBlock], const Rule& rule, uint8_t* codes,
                    uint8_t* block_scale, RowCounts& counts) {
  float amax = 0;
  for (float value : x) amax = std::max(amax, std::fabs(value));
  const float scale = rule.scale_of(amax);
  *block_scale = round_to_e4m3(scale);
  const auto v = static_cast<float>(kE4m3Magnitudes[*block_scale]);
  for (int i = 0; i < kBlock; i += 2) {
    const int even = v == 0 ? 0 : round_to_e2m1(rule.quotient(x[i], v));
    const int odd = v == 0 ? 0 : round_to_e2m1(rule.quotient(x[i + 1], v));
    codes[i / 2] = static_cast<uint8_t>(even | odd << 4);
  }
  counts.blocks += 1;
  counts.saturated += scale > 448;
  counts.zeroed += v == 0 && amax > 0;
}

}  // namespace

RowRange range_of(const void* x, DType dtype, int64_t first, int64_t cols) {
  RowRange range;
  for (int64_t i = 0; i < cols; ++i) {
    const double value = load(x, dtype, first + i);
    range.finite = range.finite && std::isfinite(value);
    range.amax = std::max(range.amax, std::fabs(value));
  }
  return range;
}

int dynamic_exponent(double amax, double largest) {
  if (amax == 0) return 0;
  int exponent = -126;
  while (amax > std::ldexp(largest, exponent)) ++exponent;
  return exponent;
}

void quantize_row(const void* x, DType dtype, int64_t first, int64_t cols,
                  const ScalePolicy& policy, const ActivationBuffers& out, int64_t row,
                  RowCounts& counts) {
  uint8_t* codes = out.codes + row * (cols / 2);
  uint8_t* block_scales = out.block_scales + row * (cols / kBlock);
  const auto [amax, finite] = range_of(x, dtype, first, cols);
  out.nonfinite[row] = finite ? 0 : 1;
  if (!finite) {
    std::fill_n(codes, cols / 2, uint8_t{0});
    std::fill_n(block_scales, cols / kBlock, uint8_t{0});
    out.row_scale[row] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  int exponent = 0;
  if (policy.kind == ScalePolicy::kDynamicToken) exponent = dynamic_exponent(amax, 2688.0);
  if (policy.kind == ScalePolicy::kPowerOfTwo) exponent = std::ilogb(policy.scale);
  out.row_scale[row] = policy.kind == ScalePolicy::kVllmOrder
                           ? policy.scale
                           : static_cast<float>(std::ldexp(1.0, exponent));
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    float block[kBlock];
    for (int i = 0; i < kBlock; ++i)
      block[i] = static_cast<float>(load(x, dtype, first + b * kBlock + i));
    if (policy.kind == ScalePolicy::kVllmOrder)
      quantize_block(block, VllmOrder(policy.scale), codes + b * (kBlock / 2), block_scales + b,
                     counts);
    else
      quantize_block(block, PowerOfTwo{exponent}, codes + b * (kBlock / 2), block_scales + b,
                     counts);
  }
}

void round_row(const void* x, DType dtype, int64_t first, int64_t cols,
               const ActivationBuffers& out, int64_t row) {
  out.nonfinite[row] = range_of(x, dtype, first, cols).finite ? 0 : 1;
  for (int64_t i = 0; i < cols; ++i)
    out.bf16[row * cols + i] = round_to_bf16(load(x, dtype, first + i));
}

}  // namespace nvfp4_moe::internal::reference
