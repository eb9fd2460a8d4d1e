// dequantize and convert_to_fp8 against plain double code with comparison-based rounding
// (formats/grid.h).
#include "core/dequantize.h"

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "formats/grid.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

struct Matrix {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  Nvfp4View view;
};

// Random bytes, rows padded with poison that must not be read: 0xFF is not a legal scale.
Matrix random_matrix(int64_t rows, int64_t cols, float tensor_scale, uint32_t seed,
                     int64_t padding = 0) {
  std::mt19937 random(seed);
  Matrix m;
  const int64_t codes_stride = cols / 2 + padding;
  const int64_t scales_stride = cols / 16 + padding;
  m.codes.assign(static_cast<size_t>(rows * codes_stride), 0xFF);
  m.scales.assign(static_cast<size_t>(rows * scales_stride), 0xFF);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols / 2; ++c)
      m.codes[static_cast<size_t>(r * codes_stride + c)] = static_cast<uint8_t>(random());
    for (int64_t b = 0; b < cols / 16; ++b)
      m.scales[static_cast<size_t>(r * scales_stride + b)] = static_cast<uint8_t>(random() % 127);
  }
  m.view = {m.codes.data(), m.scales.data(), tensor_scale, rows, cols, codes_stride, scales_stride};
  return m;
}

double exact_value(const Nvfp4View& view, int64_t r, int64_t c) {
  const uint8_t byte = view.codes[r * view.codes_stride + c / 2];
  const unsigned code = c % 2 == 0 ? byte & 15u : byte >> 4;
  const double magnitude =
      e2m1_grid().magnitudes[code & 7] *
      e4m3_grid().magnitudes[view.block_scales[r * view.scales_stride + c / 16]] *
      view.tensor_scale;
  return (code & 8) != 0 ? -magnitude : magnitude;
}

unsigned rounded(const Grid& grid, double value, double denominator, unsigned sign) {
  return static_cast<unsigned>(grid.round_quotient(std::fabs(value), denominator)) |
         (std::signbit(value) ? sign : 0);
}

constexpr float kTensorScales[] = {1.0f,   0.0123f,   0x1.fffffep-3f, 3e35f,
                                   1e-38f, 0x1p-149f, 0.0f,           1e-5f};

TEST(Dequantize, RoundsTheExactProductOnce) {
  for (const float tensor_scale : kTensorScales) {
    const Matrix m = random_matrix(9, 4096, tensor_scale, 1, 3);
    const auto count = static_cast<size_t>(m.view.rows * m.view.cols);
    std::vector<uint16_t> bf16(count), fp16(count);
    std::vector<float> fp32(count);
    ASSERT_OK(dequantize(m.view, DType::kBf16, bf16.data()));
    ASSERT_OK(dequantize(m.view, DType::kF16, fp16.data()));
    ASSERT_OK(dequantize(m.view, DType::kF32, fp32.data()));
    for (size_t i = 0; i < count; ++i) {
      const double value =
          exact_value(m.view, static_cast<int64_t>(i) / 4096, static_cast<int64_t>(i) % 4096);
      ASSERT_EQ(bf16[i], rounded(bf16_grid(), value, 1.0, 0x8000)) << value;
      ASSERT_EQ(fp16[i], rounded(fp16_grid(), value, 1.0, 0x8000)) << value;
      ASSERT_EQ(fp32[i], static_cast<float>(value)) << value;
      ASSERT_EQ(std::signbit(fp32[i]), std::signbit(value));
    }
  }
}

// A block of zeros has scale 1: one of the tensor scales is 0.
TEST(ConvertToFp8, MatchesPlainCodePerBlock) {
  for (const float tensor_scale : kTensorScales) {
    for (const Fp8Scaling scaling :
         {Fp8Scaling{0, 0}, Fp8Scaling{128, 128}, Fp8Scaling{1, 16}, Fp8Scaling{7, 40}}) {
      const Matrix m = random_matrix(131, 272, tensor_scale, 2, 1);
      const bool whole = scaling.block_rows == 0;
      const int64_t block_rows = whole ? m.view.rows : scaling.block_rows;
      const int64_t block_cols = whole ? m.view.cols : scaling.block_cols;
      const int64_t grid_rows = (m.view.rows + block_rows - 1) / block_rows;
      const int64_t grid_cols = (m.view.cols + block_cols - 1) / block_cols;
      const auto block_of = [&](int64_t r, int64_t c) {
        return static_cast<size_t>(r / block_rows * grid_cols + c / block_cols);
      };
      std::vector<uint8_t> out(static_cast<size_t>(m.view.rows * m.view.cols));
      std::vector<float> scales(static_cast<size_t>(grid_rows * grid_cols));
      ASSERT_OK(convert_to_fp8(m.view, scaling, out.data(), scales.data()));
      std::vector<double> amax(scales.size());
      for (int64_t r = 0; r < m.view.rows; ++r)
        for (int64_t c = 0; c < m.view.cols; ++c) {
          double& a = amax[block_of(r, c)];
          a = std::max(a, std::fabs(exact_value(m.view, r, c)));
        }
      for (size_t i = 0; i < scales.size(); ++i) {
        const auto scale = static_cast<float>(amax[i] / 448.0);
        ASSERT_EQ(scales[i], scale == 0.0f ? 1.0f : scale);
      }
      for (int64_t r = 0; r < m.view.rows; ++r)
        for (int64_t c = 0; c < m.view.cols; ++c) {
          const double scale = scales[block_of(r, c)], value = exact_value(m.view, r, c);
          ASSERT_EQ(out[static_cast<size_t>(r * m.view.cols + c)],
                    rounded(e4m3_grid(), value, scale, 0x80))
              << value << " scale " << scale;
        }
    }
  }
}

TEST(Dequantize, RefusesWhatItCannotRead) {
  Matrix m = random_matrix(4, 32, 1.0f, 3);
  std::vector<float> out(128), scales(8);
  std::vector<uint8_t> bytes(128);
  EXPECT_EQ(dequantize(m.view, DType::kF8E4M3, out.data()).message(),
            "dequantize: expected BF16, F16 or F32, got F8_E4M3");
  for (const uint8_t bad : std::initializer_list<uint8_t>{0x7F, 0x80, 0xFF}) {
    m.scales[5] = bad;
    const std::string message =
        "row 2 block scale 1: expected an E4M3 byte 0..126, got " + std::to_string(int{bad});
    EXPECT_THAT(dequantize(m.view, DType::kF32, out.data()),
                Refused(Code::kBadInput, "dequantize: " + message));
    EXPECT_THAT(convert_to_fp8(m.view, {}, bytes.data(), scales.data()),
                Refused(Code::kBadInput, "convert_to_fp8: " + message));
  }
  m.scales[5] = 0;
  EXPECT_OK(dequantize(m.view, DType::kF32, out.data()));
  for (const Fp8Scaling& scaling : {Fp8Scaling{128, 0}, Fp8Scaling{0, 128}, Fp8Scaling{-1, -1}})
    EXPECT_EQ(convert_to_fp8(m.view, scaling, bytes.data(), scales.data()).code(),
              Code::kInvalidArgument);
  const std::function<void(Nvfp4View&)> mistakes[] = {
      [](auto& v) { v.cols = 24; },
      [](auto& v) { v.tensor_scale = std::numeric_limits<float>::quiet_NaN(); },
      [](auto& v) { v.codes = nullptr; },
  };
  for (const auto& mistake : mistakes) {
    Nvfp4View view = m.view;
    mistake(view);
    EXPECT_FALSE(dequantize(view, DType::kF32, out.data()).ok());
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
