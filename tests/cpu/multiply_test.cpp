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

using Format = ActivationFormat;

struct Problem {
  int64_t k, panels;
  std::vector<uint8_t> codes, scales;  // (panels * 16, k/2), (panels * 16, k/16)
  std::vector<uint8_t> packed;
  std::vector<uint8_t> x_codes, x_scales;  // (rows, k/2), (rows, k/16)
  std::vector<uint16_t> x_bf16;            // (rows, k)
  std::vector<int8_t> x_int8;              // (rows, k)
  std::vector<float> x_int8_scales;        // (rows, k/16)
  std::vector<uint8_t> x_fp8;              // (rows, k)

  Problem(int64_t k_, int64_t panels_, int64_t rows, uint32_t seed) : k(k_), panels(panels_) {
    std::mt19937 random(seed);
    const auto fill = [](auto& values, int64_t size, const auto& value) {
      values.resize(static_cast<size_t>(size));
      for (auto& one : values) one = static_cast<std::decay_t<decltype(one)>>(value());
    };
    const auto any = [&] { return random() % 256; };
    const auto scale = [&] { return random() % 127; };  // zero, subnormal and all normal scales
    fill(codes, panels * kPanelRows * k / 2, any);
    fill(scales, panels * kPanelRows * k / 16, scale);
    fill(x_codes, rows * k / 2, any);
    fill(x_scales, rows * k / 16, scale);
    // Over 32 binades, so that sums round before they are scaled.
    fill(x_bf16, rows * k, [&] { return (random() & 0x80FFu) | (0x3800u + (random() % 16 << 8)); });
    fill(x_int8, rows * k, [&] { return static_cast<int>(random() % 255) - 127; });
    // All 24 bits of a significand, so that the product of two scales is rounded.
    fill(x_int8_scales, rows * k / 16, [&] {
      return std::ldexp(1.0f + 0x1p-23f * static_cast<float>(random() % (1 << 23)),
                        static_cast<int>(random() % 8) - 4);
    });
    fill(x_fp8, rows * k, [&] { return random() % kE4m3Nan | (random() & 0x80u); });
    packed.resize(static_cast<size_t>(panels * panel_bytes(k)));
    const Nvfp4View view =
        Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, panels * kPanelRows, k);
    for (int64_t p = 0; p < panels; ++p) pack_panel(view, p, packed.data() + p * panel_bytes(k));
  }

  // The sums of rows [first, first + count). Under fp8 panel p's weights are w8 2^(shift + p). Rows
  // have the layer's layout: the stride is an odd multiple of 64 bytes, and the last row is
  // followed by the rows that a tile may read past it, NaNs.
  std::vector<float> sums(const Kernels& kernels, Format format, int64_t first, int64_t count,
                          bool same_bits = false, int shift = 0,
                          bool for_single_row = false) const {
    const Multiplication& multiplication = kernels.multiplication(format);
    const int64_t chunk_bytes = multiplication.chunk_bytes + multiplication.single_row_chunk_bytes;
    const int64_t stride = (chunks_of(k) * chunk_bytes + 63) / 64 * 64 + 64,
                  rows = count + multiplication.tile_rows - 1;
    std::vector<std::byte> operands(static_cast<size_t>(stride * rows), std::byte{0xFF});
    std::vector<const std::byte*> pointers;
    for (int64_t i = first; i < first + count; ++i) {
      std::byte* const row = operands.data() + (i - first) * stride;
      pointers.push_back(row);
      switch (format) {
        case Format::kNvfp4:
          kernels.nvfp4_operands(x_codes.data() + i * k / 2, x_scales.data() + i * k / 16, k, row);
          break;
        case Format::kInt8Block:
          kernels.int8_operands(x_int8.data() + i * k, x_int8_scales.data() + i * k / 16, k, row);
          break;
        case Format::kFp8: kernels.fp8_operands(x_fp8.data() + i * k, k, row); break;
        case Format::kBf16: kernels.bf16_operands(x_bf16.data() + i * k, k, row); break;
      }
      if (for_single_row) kernels.single_row_operands(k, row);
    }
    Strip strip{
        .bytes = packed.data(), .panels = panels, .chunks = chunks_of(k), .next = packed.data()};
    if (format == Format::kFp8) strip.fp8_shift = {shift, shift + 1};
    std::vector<float> acc(static_cast<size_t>(rows * panels * kPanelRows), -1.0f);
    multiplication.multiply(strip,
                            {.rows = pointers.data(),
                             .count = count,
                             .k = k,
                             .same_bits = same_bits,
                             .for_single_row = for_single_row},
                            acc.data());
    acc.resize(static_cast<size_t>(count * panels * kPanelRows));
    return acc;
  }
  double weight(int64_t row, int64_t i) const {
    const uint8_t byte = codes[static_cast<size_t>((row * k + i) / 2)];
    return static_cast<double>(e2m1_to_float(i % 2 == 0 ? low_code(byte) : high_code(byte))) *
           static_cast<double>(e4m3_to_float(scales[static_cast<size_t>((row * k + i) / 16)]));
  }
};

constexpr int64_t kCounts[] = {1,  2,  3,  4,  5,  8,  9,  15, 16, 17, 31,
                               32, 33, 47, 48, 49, 63, 64, 65, 80, 81, 128};

// Calls body for each size of K, with one panel and with two.
template <class Body>
void for_problems(int64_t rows, const Body& body) {
  for (const int64_t k : {16, 32, 48, 64, 80, 128, 336, 1040, 2048})
    for (const int64_t panels : {1, 2}) {
      SCOPED_TRACE(testing::Message() << "K " << k << " panels " << panels);
      body(Problem(k, panels, rows, static_cast<uint32_t>(7 * k + panels)));
      if (testing::Test::HasFatalFailure()) return;
    }
}

// `some` has the bits of `all` from row `first` on.
bool same(const std::vector<float>& some, const std::vector<float>& all, size_t first = 0) {
  return first + some.size() <= all.size() &&
         std::memcmp(some.data(), all.data() + first, some.size() * sizeof(float)) == 0;
}

class Multiply : public test::KernelsTest {
 protected:
  // portable is slow, and its loop does nothing new for larger counts.
  bool too_many(int64_t count) const { return &kernels() == &kPortableKernels && count > 9; }
};
INSTANTIATE_TEST_SUITE_P(Cpu, Multiply, ::testing::ValuesIn(test::instruction_sets()),
                         test::hardware_test_name<Kernels>);

TEST_P(Multiply, IntegerProductsHaveThePortableBitsForAnyNumberOfLines) {
  for_problems(128, [&](const Problem& problem) {
    for (const Format format : {Format::kNvfp4, Format::kInt8Block}) {
      const std::vector<float> all = problem.sums(kPortableKernels, format, 0, 128);
      for (const int64_t count : kCounts)
        ASSERT_TRUE(too_many(count) || same(problem.sums(kernels(), format, 0, count), all))
            << to_string(format) << " rows " << count;
    }
  });
}

// Exact products added in one order: these are the instruction sets that compute W4A16 and fp8 with
// fp32 multiply-adds (docs/explanation/cpu.md).
TEST_P(Multiply, InFp32HasThePortableBits) {
  if (std::string_view(kernels().bf16.name).find("fp32") == std::string_view::npos)
    GTEST_SKIP() << kernels().backend_name << " multiplies in bf16 (" << kernels().bf16.name << ")";
  for_problems(15, [&](const Problem& problem) {
    for (int64_t count = 1; count <= 15; ++count) {  // every number of rows that tiles leave
      const auto expect_same = [&](Format format, bool same_bits, int shift) {
        ASSERT_TRUE(same(problem.sums(kernels(), format, 0, count, same_bits, shift),
                         problem.sums(kPortableKernels, format, 0, count, same_bits, shift)))
            << to_string(format) << " rows " << count << " shift " << shift;
      };
      for (const bool same_bits : {false, true}) expect_same(Format::kBf16, same_bits, 0);
      // 3 is the largest weight, 12 makes many of them subnormal
      for (const int shift : {3, 7, 12}) expect_same(Format::kFp8, false, shift);
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
      const std::vector<float> some = problem.sums(kernels(), Format::kBf16, 0, count);
      for (size_t i = 0; i < some.size(); ++i)
        ASSERT_LE(std::fabs(static_cast<double>(some[i]) - exact[i]), bound * size[i])
            << "rows " << count << " element " << i;
    }
  });
}

TEST_P(Multiply, W4A16DoesNotDependOnOtherLinesWhereBitsMustBeTheSame) {
  const Problem problem(1040, 2, 128, 3);
  const std::vector<float> all = problem.sums(kernels(), Format::kBf16, 0, 128, true);
  for (const int64_t count : {1, 2, 8, 9, 17, 33, 50, 65})
    EXPECT_TRUE(same(problem.sums(kernels(), Format::kBf16, 128 - count, count, true), all,
                     static_cast<size_t>((128 - count) * 2 * kPanelRows)))
        << "rows " << count;
}

// Operands for single rows change no bit of a single row, whatever its numbers. Several rows have
// the bits that they have without such operands, or all those that they have alone.
void expect_same_bits_for_single_rows(const Kernels& kernels) {
  constexpr int64_t kRows = 400;
  std::mt19937 random(11);
  for (const int64_t k : {64, 80, 1040})
    for (const int64_t panels : {1, 2}) {
      Problem problem(k, panels, kRows, static_cast<uint32_t>(k + panels));
      // A block's numbers are below 2^(last - 126) and lie in up to 24 binades: those that need two
      // bytes, three and more. Some blocks are at both ends of bf16, with subnormals, Inf and NaN,
      // some have long significands and some are nearly all zeros.
      for (int64_t i = 0; i < kRows * k; i += kBlockElems) {
        const uint_fast32_t last = random() % 4 == 0 ? random() % 256 : 120 + random() % 8,
                            binades = random() % 25, significands = random() % 4 == 0 ? 0x7C : 0;
        const bool sparse = random() % 8 == 0;
        for (int64_t j = i; j < i + kBlockElems; ++j) {
          const uint_fast32_t exponent = last - std::min(last, random() % (binades + 1)),
                              sign = random() % 2 << 15, bits = random() % 128 | significands;
          problem.x_bf16[static_cast<size_t>(j)] = static_cast<uint16_t>(
              sparse && random() % 8 != 0 ? sign : sign | exponent << 7 | bits);
        }
      }
      const auto sums = [&](int64_t first, int64_t count, bool same_bits, bool for_single_row) {
        std::vector<float> sums =
            problem.sums(kernels, Format::kBf16, first, count, same_bits, 0, for_single_row);
        // a NaN may have any sign and payload
        for (float& sum : sums) sum = std::isnan(sum) ? NAN : sum;
        return sums;
      };
      const size_t row_sums = static_cast<size_t>(panels * kPanelRows);
      std::vector<float> alone;  // (kRows, panels * 16)
      for (int64_t i = 0; i < kRows; ++i) {
        const std::vector<float> plain = sums(i, 1, false, false);
        ASSERT_TRUE(same(sums(i, 1, false, true), plain) && plain.size() == row_sums)
            << "K " << k << " panels " << panels << " row " << i;
        alone.insert(alone.end(), plain.begin(), plain.end());
      }
      for (const bool same_bits : {false, true})
        for (int64_t count = same_bits ? 1 : 2; count <= 5; ++count)
          for (int64_t i = 0; i + count <= (same_bits ? count : kRows); i += count) {
            const std::vector<float> some = sums(i, count, same_bits, true);
            ASSERT_TRUE(same(some, sums(i, count, same_bits, false)) ||
                        (!same_bits && same(some, alone, static_cast<size_t>(i) * row_sums)))
                << "K " << k << " panels " << panels << " rows " << count << " from " << i
                << (same_bits ? " same bits" : "");
          }
    }
}

TEST(SingleRowOperands, ChangeNoBit) {
  int64_t tested = 0;
  for (const Kernels* kernels : kAllKernels) {
    if (kernels->bf16.single_row_chunk_bytes == 0 || !kernels->runs_on_host()) continue;
    SCOPED_TRACE(kernels->backend_name);
    expect_same_bits_for_single_rows(*kernels);
    ++tested;
  }
  if (tested == 0) GTEST_SKIP() << "no instruction set of this processor has such operands";
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
