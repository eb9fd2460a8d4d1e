// Strips times any number of rows, for every instruction set: bits of 8-bit activations, bounds of
// W4A16.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "backend/cpu/kernels.h"
#include "core/float_formats.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cpu {
namespace {

// Rows in the layer's layout: the stride is an odd multiple of 64 bytes, and the last row is
// followed by the rows that a tile may read past it.
struct Rows {
  Rows(const Multiplication& multiplication, int64_t k, int64_t count)
      : bytes((chunks_of(k) * multiplication.chunk_bytes + 63) / 64 * 64 + 64),
        data(static_cast<size_t>(bytes * (count + multiplication.tile_rows - 1)), std::byte{0xFF}) {
    for (int64_t i = 0; i < count; ++i) pointers.push_back(data.data() + i * bytes);
  }
  int64_t bytes;
  std::vector<std::byte> data;  // NaNs unless written
  std::vector<const std::byte*> pointers;
  std::byte* at(int64_t i) { return data.data() + i * bytes; }
};

struct Problem {
  int64_t k, panels;
  std::vector<uint8_t> codes, scales;  // (panels * 16, k/2), (panels * 16, k/16)
  std::vector<uint8_t> packed;
  std::vector<uint8_t> x_codes, x_scales;  // (rows, k/2), (rows, k/16)
  std::vector<uint16_t> x_bf16;            // (rows, k)
  std::vector<int8_t> x_int8;              // (rows, k)
  std::vector<float> x_int8_scales;        // (rows, k/16)

  Problem(int64_t k_, int64_t panels_, int64_t rows, uint32_t seed) : k(k_), panels(panels_) {
    std::mt19937 random(seed);
    const auto fill = [&](std::vector<uint8_t>& bytes, int64_t size, uint32_t most) {
      bytes.resize(static_cast<size_t>(size));
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() % (most + 1));
    };
    fill(codes, panels * kPanelRows * k / 2, 255);
    fill(scales, panels * kPanelRows * k / 16, 0x7E);  // zero, subnormal and all normal scales
    fill(x_codes, rows * k / 2, 255);
    fill(x_scales, rows * k / 16, 0x7E);
    x_bf16.resize(static_cast<size_t>(rows * k));
    // Over 32 binades, so that sums round before they are scaled.
    for (uint16_t& x : x_bf16)
      x = static_cast<uint16_t>((random() & 0x80FFu) | (0x3800u + (random() % 16 << 8)));
    x_int8.resize(static_cast<size_t>(rows * k));
    for (int8_t& x : x_int8) x = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
    x_int8_scales.resize(static_cast<size_t>(rows * k / 16));
    // All 24 bits of a significand, so that the product of two scales is rounded.
    for (float& s : x_int8_scales)
      s = std::ldexp(1.0f + 0x1p-23f * static_cast<float>(random() % (1 << 23)),
                     static_cast<int>(random() % 8) - 4);
    packed.resize(static_cast<size_t>(panels * panel_bytes(k)));
    const Nvfp4View view =
        Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, panels * kPanelRows, k);
    for (int64_t p = 0; p < panels; ++p) pack_panel(view, p, packed.data() + p * panel_bytes(k));
  }
  Strip strip() const {
    return {
        .bytes = packed.data(), .panels = panels, .chunks = chunks_of(k), .next = packed.data()};
  }
  std::vector<float> multiply(const Multiplication& multiplication, Rows& rows, int64_t count,
                              bool same_bits) const {
    std::vector<float> acc(
        static_cast<size_t>((count + multiplication.tile_rows - 1) * panels * kPanelRows), -1.0f);
    multiplication.multiply(
        strip(), {.rows = rows.pointers.data(), .count = count, .k = k, .same_bits = same_bits},
        acc.data());
    acc.resize(static_cast<size_t>(count * panels * kPanelRows));
    return acc;
  }
  std::vector<float> nvfp4(const Kernels& kernels, int64_t count) const {
    Rows rows(kernels.nvfp4, k, count);
    for (int64_t i = 0; i < count; ++i)
      kernels.nvfp4_operands(x_codes.data() + i * k / 2, x_scales.data() + i * k / 16, k,
                             rows.at(i));
    return multiply(kernels.nvfp4, rows, count, false);
  }
  std::vector<float> int8_block(const Kernels& kernels, int64_t count) const {
    Rows rows(kernels.int8_block, k, count);
    for (int64_t i = 0; i < count; ++i)
      kernels.int8_operands(x_int8.data() + i * k, x_int8_scales.data() + i * k / 16, k,
                            rows.at(i));
    return multiply(kernels.int8_block, rows, count, false);
  }
  // Panel p's weights are w8 2^(shift + p).
  std::vector<float> fp8(const Kernels& kernels, int64_t count, int shift) const {
    Rows rows(kernels.fp8, k, count);
    std::vector<uint8_t> row_codes(static_cast<size_t>(k));
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t e = 0; e < k; ++e) {
        const int x = x_bf16[static_cast<size_t>(i * k + e)];
        row_codes[static_cast<size_t>(e)] =
            static_cast<uint8_t>((x & 0x7F) % kE4m3Nan | (x >> 8 & 0x80));
      }
      kernels.fp8_operands(row_codes.data(), k, rows.at(i));
    }
    Strip shifted = strip();
    shifted.fp8_shift = {shift, shift + 1};
    std::vector<float> acc(static_cast<size_t>(count * panels * kPanelRows), -1.0f);
    kernels.fp8.multiply(shifted, {.rows = rows.pointers.data(), .count = count, .k = k},
                         acc.data());
    return acc;
  }
  std::vector<float> bf16(const Kernels& kernels, int64_t first, int64_t count,
                          bool same_bits) const {
    Rows rows(kernels.bf16, k, count);
    for (int64_t i = 0; i < count; ++i)
      kernels.bf16_operands(x_bf16.data() + (first + i) * k, k, rows.at(i));
    return multiply(kernels.bf16, rows, count, same_bits);
  }
  double weight(int64_t row, int64_t i) const {
    const uint8_t byte = codes[static_cast<size_t>((row * k + i) / 2)];
    return static_cast<double>(e2m1_to_float(i % 2 == 0 ? low_code(byte) : high_code(byte))) *
           static_cast<double>(e4m3_to_float(scales[static_cast<size_t>((row * k + i) / 16)]));
  }
};

constexpr int64_t kCounts[] = {1,  2,  3,  4,  5,  8,  9,  15, 16, 17, 31,
                               32, 33, 47, 48, 49, 63, 64, 65, 80, 81, 128};
constexpr int64_t kSizes[] = {16, 32, 48, 64, 80, 128, 336, 1040, 2048};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Calls body for each size of K, with one panel and with two.
template <class Body>
void for_problems(int64_t rows, const Body& body) {
  for (const int64_t k : kSizes)
    for (const int64_t panels : {1, 2}) {
      SCOPED_TRACE(testing::Message() << "K " << k << " panels " << panels);
      body(Problem(k, panels, rows, static_cast<uint32_t>(7 * k + panels)));
      if (testing::Test::HasFatalFailure()) return;
    }
}

class Multiply : public test::KernelsTest {
 protected:
  // portable is slow, and its loop does nothing new for larger counts.
  bool too_many(int64_t count) const { return &kernels() == &kPortableKernels && count > 9; }
};
INSTANTIATE_TEST_SUITE_P(Cpu, Multiply, ::testing::ValuesIn(test::instruction_sets()),
                         test::hardware_test_name<Kernels>);

TEST_P(Multiply, IntegerProductsHaveThePortableBitsForAnyNumberOfLines) {
  for (const auto of_format : {&Problem::nvfp4, &Problem::int8_block})
    for_problems(128, [&](const Problem& problem) {
      const std::vector<float> all = (problem.*of_format)(kPortableKernels, 128);
      for (const int64_t count : kCounts) {
        if (too_many(count)) continue;
        const std::vector<float> some = (problem.*of_format)(kernels(), count);
        ASSERT_TRUE(same(some, {all.begin(), all.begin() + std::ssize(some)})) << "rows " << count;
      }
    });
}

// Exact products added in one order: these are the instruction sets that compute W4A16 and fp8 with
// fp32 multiply-adds (docs/explanation/cpu.md).
TEST_P(Multiply, InFp32HasThePortableBits) {
  if (std::string_view(kernels().bf16.name).find("fp32") == std::string_view::npos)
    GTEST_SKIP() << kernels().backend_name << " multiplies in bf16 (" << kernels().bf16.name << ")";
  for_problems(13, [&](const Problem& problem) {
    for (const int64_t count : {1, 2, 3, 4, 5, 8, 13}) {
      SCOPED_TRACE(testing::Message() << "rows " << count);
      for (const bool same_bits : {false, true})
        ASSERT_TRUE(same(problem.bf16(kernels(), 0, count, same_bits),
                         problem.bf16(kPortableKernels, 0, count, same_bits)));
      // 3 is the largest weight, 12 makes many of them subnormal
      for (const int shift : {3, 7, 12})
        ASSERT_TRUE(
            same(problem.fp8(kernels(), count, shift), problem.fp8(kPortableKernels, count, shift)));
    }
  });
}

// |err| <= (K/4 + 4) 2^-24 sum |p| (docs/explanation/numerics.md), for the sum before any epilogue.
TEST_P(Multiply, W4A16IsWithinItsBoundForAnyNumberOfLines) {
  for_problems(128, [&](const Problem& problem) {
    const int64_t k = problem.k, rows = problem.panels * kPanelRows;
    std::vector<double> exact(static_cast<size_t>(128 * rows)), size(exact.size());
    for (int64_t i = 0; i < 128 && !too_many(i + 1); ++i)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t e = 0; e < k; ++e) {
          const double product =
              problem.weight(r, e) *
              static_cast<double>(bf16_to_float(problem.x_bf16[static_cast<size_t>(i * k + e)]));
          exact[static_cast<size_t>(i * rows + r)] += product;
          size[static_cast<size_t>(i * rows + r)] += std::fabs(product);
        }
    const double bound = (static_cast<double>(k) / 4 + 4) * 0x1p-24;
    for (const int64_t count : kCounts) {
      if (too_many(count)) continue;
      const std::vector<float> some = problem.bf16(kernels(), 0, count, false);
      for (size_t i = 0; i < some.size(); ++i)
        ASSERT_LE(std::fabs(static_cast<double>(some[i]) - exact[i]), bound * size[i])
            << "rows " << count << " element " << i;
    }
  });
}

TEST_P(Multiply, W4A16DoesNotDependOnOtherLinesWhereBitsMustBeTheSame) {
  const Problem problem(1040, 2, 128, 3);
  const std::vector<float> all = problem.bf16(kernels(), 0, 128, true);
  for (const int64_t count : {1, 2, 8, 9, 17, 33, 50, 65}) {
    const int64_t first = 128 - count;
    EXPECT_TRUE(same(problem.bf16(kernels(), first, count, true),
                     {all.begin() + first * 2 * kPanelRows, all.end()}))
        << "rows " << count;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
