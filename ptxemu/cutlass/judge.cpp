// The results that a kernel may write, given the exact sums.
//
// Exact data: the accumulator is the sum. alpha x accumulator is rounded to fp32 once, beta c is
// added by one fma, and the output is rounded once, as CUTLASS's linear combination is documented;
// so every bit is known.
//
// Other data: a matrix instruction adds its products to the accumulator with one rounding to fp32
// here, so after s of them the accumulator is off by at most s 2^-24 times the sum of the products'
// magnitudes M. The factor (1 + 2^-12) covers the growth of these errors themselves, which is below
// (1 + 2^-24)^s. Every number between the ends is allowed.
//
// An E2M1 output has a scale for each 16 columns, UE4M3 of amax norm / 6, and codes of x norm /
// scale. CUTLASS takes two approximate reciprocals, each within 2^-23, and rounds up to three
// products: 2^-21 in all either way.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "problem.h"

namespace cutlass_oracle {
namespace {

constexpr double kQuantizeError = 0x1p-21;

struct Interval {
  double low, high;
};

float bf16_value(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
// Rounds to nearest even. NaN does not occur.
uint16_t bf16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The nearest of the values of a format without signs, ties to the even code; the largest for
// magnitudes beyond it.
template <class Value>
int nearest(double x, int largest, Value value) {
  int code = 0;
  while (code < largest && (value(code) + value(code + 1)) / 2 < x) ++code;
  if (code < largest && (value(code) + value(code + 1)) / 2 == x && code % 2) ++code;
  return code;
}
double e2m1_value(int code) {
  static constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}
double ue4m3_value(int code) {
  return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + (code & 7), (code >> 3) - 10);
}
double to_e2m1(double x) {
  const double rounded = e2m1_value(nearest(std::abs(x), 7, e2m1_value));
  return x < 0 ? -rounded : rounded;
}
int to_ue4m3(double x) { return nearest(x, 0x7e, ue4m3_value); }

// alpha x sum + beta c in fp32, before the output's rounding.
Interval result(const Problem& problem, const Sums& sums, Data data, size_t at) {
  const double sum = std::ldexp(static_cast<double>(sums.sum[at]), -sums.bits);
  const double magnitude = std::ldexp(static_cast<double>(sums.magnitude[at]), -sums.bits);
  const double slack = data == Data::kExact ? 0 : sums.steps * 0x1p-24 * magnitude * (1 + 0x1p-12);
  const auto finish = [&](double accumulator) {
    const float scaled = problem.alpha * static_cast<float>(accumulator);
    return static_cast<double>(
        problem.c.empty() ? scaled : std::fma(problem.beta, bf16_value(problem.c[at]), scaled));
  };
  // Rounding to fp32 keeps the order, so the ends of the interval are those of the result.
  const double one = finish(sum - slack), other = finish(sum + slack);
  return {std::min(one, other), std::max(one, other)};
}

std::string told(const Problem& problem, size_t at, double got, const Interval& want) {
  const int n = problem.size.n;
  std::ostringstream text;
  text.precision(9);
  text << "(" << problem.size.m << ", " << n << ", " << problem.size.k << ") element (" << at / n
       << ", " << at % n << "): expected " << want.low;
  if (want.high != want.low) text << " to " << want.high;
  text << ", got " << got;
  return text.str();
}

std::string judge_values(const Problem& problem, const Sums& sums, Output output, Data data,
                         const std::vector<uint8_t>& d) {
  for (size_t at = 0; at < sums.sum.size(); ++at) {
    Interval want = result(problem, sums, data, at);
    double got;
    if (output == Output::kF32) {
      float value;
      std::memcpy(&value, &d[4 * at], 4);
      got = value;
    } else {
      uint16_t bits;
      std::memcpy(&bits, &d[2 * at], 2);
      got = bf16_value(bits);
      want = {bf16_value(bf16_of(static_cast<float>(want.low))),
              bf16_value(bf16_of(static_cast<float>(want.high)))};
    }
    if (!(got >= want.low && got <= want.high)) return told(problem, at, got, want);
  }
  return "";
}

std::string judge_nvfp4(const Problem& problem, const Sums& sums, Data data,
                        const std::vector<uint8_t>& d, const std::vector<uint8_t>& d_scales) {
  const int n = problem.size.n;
  const double norm = problem.norm;
  for (size_t first = 0; first < sums.sum.size(); first += 16) {
    Interval x[16], amax{0, 0};
    for (size_t i = 0; i < 16; ++i) {
      x[i] = result(problem, sums, data, first + i);
      const double least = x[i].low > 0 ? x[i].low : x[i].high < 0 ? -x[i].high : 0;
      amax.low = std::max(amax.low, least);
      amax.high = std::max({amax.high, -x[i].low, x[i].high});
    }
    const int row = static_cast<int>(first) / n, column = static_cast<int>(first) % n / 16;
    const int code = d_scales[scale_offset(row, column, n / 16)];
    const int least = to_ue4m3(amax.low * norm / 6 * (1 - kQuantizeError)),
              most = to_ue4m3(amax.high * norm / 6 * (1 + kQuantizeError));
    if (code < least || code > most)
      return "scale of 16: " +
             told(problem, first, code, {static_cast<double>(least), static_cast<double>(most)});
    // The reciprocal of 0 is infinite, and CUTLASS takes the largest finite fp32 instead: all but 0
    // saturates.
    const double factor = code == 0 ? 0x1.fffffep127 : norm / ue4m3_value(code);
    for (size_t i = 0; i < 16; ++i) {
      const double got = e2m1_value(d[(first + i) / 2] >> (i % 2 * 4) & 15);
      const auto away = [&](double end, double sign) {
        return to_e2m1(end * factor * (1 + (end < 0 ? -sign : sign) * kQuantizeError));
      };
      const Interval want{away(x[i].low, -1), away(x[i].high, 1)};
      if (!(got >= want.low && got <= want.high)) return told(problem, first + i, got, want);
    }
  }
  return "";
}

}  // namespace

int output_bits(Output output) {
  return output == Output::kF32 ? 32 : output == Output::kBf16 ? 16 : 4;
}

std::string judge(const Problem& problem, const Sums& sums, Output output, Data data,
                  const std::vector<uint8_t>& d, const std::vector<uint8_t>& d_scales) {
  if (data == Data::kExact)
    for (const int64_t magnitude : sums.magnitude) {
      // Every product is a multiple of 1/16 (NVFP4: halves by halves, scales of at least 1/2 each)
      // or of 1 (bf16).
      const double units =
          std::ldexp(static_cast<double>(magnitude), (problem.a.nvfp4 ? 4 : 0) - sums.bits);
      if (units > 0x1p24) return "the data of this size is not exact in fp32";
    }
  return output == Output::kNvfp4 ? judge_nvfp4(problem, sums, data, d, d_scales)
                                  : judge_values(problem, sums, output, data, d);
}

}  // namespace cutlass_oracle
