// Deterministic operands, and their products in integers.
#include "problem.h"

#include <cmath>
#include <cstring>

namespace cutlass_oracle {
namespace {

constexpr int kBf16Bits = 15;                                  // bf16 values are multiples of 2^-15
constexpr int kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};          // E2M1 without its sign, in halves
constexpr int kNan = 0x7f, kLargestScale = 0x7e, kOne = 0x38;  // UE4M3

int32_t scale_value(int code) { return code < 8 ? code : (8 + (code & 7)) << ((code >> 3) - 1); }

int pick(std::mt19937& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
}

void fill_nvfp4(Operand& x, Data data, std::mt19937& random) {
  const int columns = x.k / 16;
  x.per_factor = 16;
  x.bytes.assign(static_cast<size_t>(x.rows) * x.k / 2, 0);
  x.scales.assign(static_cast<size_t>(scale_bytes(x.rows, columns)), kNan);
  for (int row = 0; row < (x.rows + 127) / 128 * 128; ++row)
    for (int column = columns; column < (columns + 3) / 4 * 4; ++column)
      x.scales[scale_offset(row, column, columns)] = 0;
  for (int row = 0; row < x.rows; ++row)
    for (int column = 0; column < columns; ++column) {
      // Powers of two from 1/2 to 2, so that sums are exact; or any code that is a number.
      const int code =
          data == Data::kExact ? kOne + 8 * pick(random, -1, 1) : pick(random, 0, kLargestScale);
      x.scales[scale_offset(row, column, columns)] = static_cast<uint8_t>(code);
      x.factors.push_back(scale_value(code));
      for (int i = 0; i < 16; ++i) {
        const int e2m1 = pick(random, 0, 15), at = row * x.k + 16 * column + i;
        x.bytes[at / 2] |= static_cast<uint8_t>(e2m1 << (at % 2 * 4));
        x.values.push_back(e2m1 & 8 ? -kHalves[e2m1 & 7] : kHalves[e2m1 & 7]);
      }
    }
}

void fill_bf16(Operand& x, Data data, std::mt19937& random) {
  x.per_factor = x.k;
  x.factors.assign(static_cast<size_t>(x.rows), 1);
  for (int i = 0; i < x.rows * x.k; ++i) {
    // Integers up to 8; or eight bits of fraction over 2^-15 to 1.
    const int value = data == Data::kExact ? pick(random, -8, 8) << kBf16Bits
                                           : pick(random, -255, 255) << pick(random, 0, 8);
    const float exact = std::ldexp(static_cast<float>(value), -kBf16Bits);
    uint32_t bits;
    std::memcpy(&bits, &exact, 4);
    x.bytes.push_back(static_cast<uint8_t>(bits >> 16));
    x.bytes.push_back(static_cast<uint8_t>(bits >> 24));
    x.values.push_back(value);
  }
}

Operand make_operand(int rows, int k, bool nvfp4, Data data, std::mt19937& random) {
  Operand x{};
  x.rows = rows, x.k = k, x.nvfp4 = nvfp4;
  if (nvfp4)
    fill_nvfp4(x, data, random);
  else
    fill_bf16(x, data, random);
  return x;
}

}  // namespace

int64_t scale_bytes(int rows, int columns) {
  return int64_t{(rows + 127) / 128 * 128} * ((columns + 3) / 4 * 4);
}
int64_t scale_offset(int row, int column, int columns) {
  return (int64_t{row >> 7} * ((columns + 3) / 4) + (column >> 2)) * 512 + (row & 31) * 16 +
         (row >> 5 & 3) * 4 + (column & 3);
}

Problem make_problem(const Size& size, bool nvfp4, Data data, bool with_c, std::mt19937& random) {
  static constexpr float kAlphas[] = {1.0f, 0.375f, -0.25f, 3.0f};
  Problem problem{size,
                  make_operand(size.m, size.k, nvfp4, data, random),
                  make_operand(size.n, size.k, nvfp4, data, random),
                  {},
                  kAlphas[random() % 4],
                  0.0f,
                  0.0f};
  // The scales of an E2M1 output are amax / 6 times norm: so some of them round to 0 and some
  // saturate.
  problem.norm = data == Data::kExact ? 0.0625f : std::ldexp(1.0f, -14);
  if (with_c) {
    problem.beta = -0.5f;
    for (int i = 0; i < size.m * size.n; ++i) {
      const float value = static_cast<float>(pick(random, -128, 128));  // bf16 holds these
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      problem.c.push_back(static_cast<uint16_t>(bits >> 16));
    }
  }
  return problem;
}

Sums exact_sums(const Problem& problem) {
  const auto [m, n, k] = problem.size;
  const Operand &a = problem.a, &b = problem.b;
  Sums sums;
  sums.bits = a.nvfp4 ? 2 * (1 + 9) : 2 * kBf16Bits;
  sums.steps = a.nvfp4 ? (k + 63) / 64 : (k + 15) / 16;
  const int blocks = k / a.per_factor;
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      int64_t sum = 0, magnitude = 0;
      for (int block = 0; block < blocks; ++block) {
        int64_t part = 0, absolute = 0;
        for (int i = 0; i < a.per_factor; ++i) {
          const int64_t product = int64_t{a.values[row * k + block * a.per_factor + i]} *
                                  b.values[column * k + block * a.per_factor + i];
          part += product;
          absolute += std::abs(product);
        }
        const int64_t factor =
            int64_t{a.factors[row * blocks + block]} * b.factors[column * blocks + block];
        sum += part * factor;
        magnitude += absolute * factor;
      }
      sums.sum.push_back(sum);
      sums.magnitude.push_back(magnitude);
    }
  return sums;
}

}  // namespace cutlass_oracle
