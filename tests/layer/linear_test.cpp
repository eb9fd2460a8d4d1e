// The dense linear of every host backend: the contract's bound around the exact value, element by
// element.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "core/executor.h"
#include "core/float_formats.h"
#include "core/fp8.h"
#include "core/quantize.h"
#include "judge/judge.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/sizes.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

struct Linear {
  LinearWeights weights;
  std::vector<uint8_t> codes, block_scales;

  Linear(const Backend& backend, int64_t rows, int64_t cols, ActivationFormat format,
         ActivationScale scale) {
    Random random(static_cast<uint64_t>(rows * 1000 + cols));
    std::vector<float> values(static_cast<size_t>(rows * cols));
    for (float& value : values) value = static_cast<float>(random.normal());
    codes.resize(values.size() / 2);
    block_scales.resize(values.size() / 16);
    const float tensor_scale = 5.3f / 2688;
    QuantizeCounts counts;
    EXPECT_OK(quantize_weights(values, rows, cols, tensor_scale, ScaleSearch::kMax, codes.data(),
                               block_scales.data(), counts));
    pack(backend, rows, cols, tensor_scale, format, scale);
  }
  // Uses these codes and block scales.
  Linear(const Backend& backend, int64_t rows, int64_t cols, ActivationFormat format,
         std::vector<uint8_t> codes_, std::vector<uint8_t> block_scales_)
      : codes(std::move(codes_)), block_scales(std::move(block_scales_)) {
    pack(backend, rows, cols, 1.0f, format, ActivationScale::kDynamicToken);
  }

  void pack(const Backend& backend, int64_t rows, int64_t cols, float tensor_scale,
            ActivationFormat format, ActivationScale scale) {
    weights.rows = rows;
    weights.cols = cols;
    weights.activation_format = format;
    weights.activation_scale = scale;
    if (scale == ActivationScale::kStatic) weights.input_scale = 0x1p-8f;
    if (scale == ActivationScale::kCompat) weights.input_scale = 0.0019f;
    auto bytes = backend.allocate(backend.linear_bytes(rows, cols), 0, "packed weights");
    EXPECT_OK(bytes);
    weights.bytes = std::move(*bytes);
    EXPECT_OK(backend.linear_pack(weights, Nvfp4View::contiguous(codes.data(), block_scales.data(),
                                                                 tensor_scale, rows, cols)));
  }

  std::vector<uint8_t> run(const Backend& backend, const std::vector<uint8_t>& x, DType dtype,
                           int64_t tokens, DType out_dtype, Executor& executor) const {
    std::vector<uint8_t> out(static_cast<size_t>(tokens * weights.rows * bits(out_dtype) / 8),
                             0xFF);
    if (backend.memory != nullptr) {
      run_on_device(backend, x, dtype, tokens, out, out_dtype);
      return out;
    }
    std::vector<std::byte> storage(backend.linear_workspace_bytes(weights, tokens) + 512,
                                   std::byte{0xFF});
    std::byte* workspace =
        storage.data() + (256 - reinterpret_cast<uintptr_t>(storage.data()) % 256);
    RunContext context;
    context.executor = &executor;
    EXPECT_OK(backend.linear_run(weights, {tokens, x.data(), dtype, out.data(), out_dtype},
                                 workspace, context));
    const size_t used = backend.linear_workspace_bytes(weights, tokens);
    for (std::byte* guard = workspace + used; guard < storage.data() + storage.size(); ++guard)
      EXPECT_EQ(*guard, std::byte{0xFF});
    return out;
  }

  // x and out are copied there and back; the workspace is poisoned and followed by guard bytes.
  void run_on_device(const Backend& backend, const std::vector<uint8_t>& x, DType dtype,
                     int64_t tokens, std::vector<uint8_t>& out, DType out_dtype) const {
    const size_t used = backend.linear_workspace_bytes(weights, tokens);
    std::vector<uint8_t> space(used + 256, 0xFF);
    const auto placed = [&](const std::vector<uint8_t>& bytes) {
      auto buffer = backend.allocate(bytes.size(), 0, "batch");
      EXPECT_OK(buffer);
      EXPECT_OK(backend.memory->to_device(0, buffer->data(), bytes.data(), bytes.size(), nullptr));
      return *std::move(buffer);
    };
    const Buffer device_x = placed(x), device_out = placed(out), workspace = placed(space);
    EXPECT_OK(backend.linear_run(weights,
                                 {tokens, device_x.data(), dtype, device_out.data(), out_dtype},
                                 workspace.data(), RunContext{}));
    EXPECT_OK(backend.memory->to_host(0, out.data(), device_out.data(), out.size(), nullptr));
    EXPECT_OK(backend.memory->to_host(0, space.data(), workspace.data(), space.size(), nullptr));
    for (size_t guard = used; guard < space.size(); ++guard) EXPECT_EQ(space[guard], 0xFF);
  }
};

std::vector<uint8_t> make_x(int64_t tokens, int64_t cols, DType dtype, bool with_nan) {
  Random random(99);
  const size_t width = static_cast<size_t>(bits(dtype)) / 8;
  std::vector<uint8_t> x(static_cast<size_t>(tokens * cols) * width);
  for (int64_t i = 0; i < tokens * cols; ++i) {
    auto value = static_cast<float>(random.normal());
    if (with_nan && i == cols + 3) value = std::numeric_limits<float>::quiet_NaN();
    const uint16_t narrow = dtype == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
    if (dtype == DType::kF32)
      std::memcpy(x.data() + static_cast<size_t>(i) * width, &value, width);
    else
      std::memcpy(x.data() + static_cast<size_t>(i) * width, &narrow, width);
  }
  return x;
}

class LinearOfBackend : public test::BackendTest {
 protected:
  // Queried with the smallest layer of the same activations.
  bool declined(ActivationFormat format) const {
    MoeOptions smallest = test::sizes_of(1, 1, 16, 16);
    smallest.activation_format = format;
    return test::declines(backend(), *MoeConfig::make(smallest));
  }
};

TEST_P(LinearOfBackend, LiesWithinTheBoundOfTheExactValue) {
  const struct {
    int64_t rows, cols, tokens;
  } shapes[] = {{48, 80, 1}, {80, 208, 5}, {33, 64, 17}, {96, 128, 34}};
  for (const ActivationFormat format : test::kActivationFormats) {
    const bool fp8 = format == ActivationFormat::kFp8;
    if (declined(format)) continue;
    for (ActivationScale scale :
         {ActivationScale::kDynamicToken, ActivationScale::kStatic, ActivationScale::kCompat}) {
      if (format == ActivationFormat::kInt8Block && scale != ActivationScale::kDynamicToken)
        continue;                                              // not legal
      if (fp8 && scale == ActivationScale::kCompat) continue;  // not legal either
      for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
        for (const auto& shape : shapes) {
          SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(scale) + " " +
                       to_string(dtype) + " " + std::to_string(shape.rows) + "x" +
                       std::to_string(shape.cols));
          const Linear linear(backend(), shape.rows, shape.cols, format, scale);
          const std::vector<uint8_t> x = make_x(shape.tokens, shape.cols, dtype, shape.tokens > 2);
          const std::vector<float> out = test::to_floats(
              linear.run(backend(), x, dtype, shape.tokens, dtype, serial_executor()), dtype);
          const std::vector<float> values = test::to_floats(x, dtype);
          const test::OracleFp8Weights rounded = test::oracle_fp8_weights(
              Nvfp4View::contiguous(linear.codes.data(), linear.block_scales.data(),
                                    linear.weights.tensor_scale, shape.rows, shape.cols));
          const std::vector<double> w =
              fp8 ? rounded.values
                  : test::oracle_decode(linear.codes.data(), linear.block_scales.data(), shape.rows,
                                        shape.cols);
          const double weight_scale =
              std::ldexp(double{linear.weights.tensor_scale}, fp8 ? rounded.shift : 0);
          if (fp8) {
            EXPECT_EQ(linear.weights.fp8.shift, rounded.shift);
            EXPECT_EQ(linear.weights.fp8.inexact, rounded.inexact);
          }
          for (int64_t t = 0; t < shape.tokens; ++t) {
            const std::vector<double> line(values.begin() + t * shape.cols,
                                           values.begin() + (t + 1) * shape.cols);
            test::OracleRow quantized;
            if (format == ActivationFormat::kNvfp4) {
              quantized = test::oracle_quantize(line, linear.weights.input_scale,
                                                scale == ActivationScale::kCompat);
            } else if (format == ActivationFormat::kInt8Block) {
              quantized = test::oracle_quantize_int8(line);
            } else if (fp8) {
              quantized = test::oracle_quantize_fp8(line, linear.weights.input_scale);
            } else {
              for (double value : line) {
                quantized.nonfinite = quantized.nonfinite || !std::isfinite(value);
                quantized.values.push_back(
                    static_cast<double>(test::oracle_round(value, DType::kBf16)));
              }
            }
            for (int64_t n = 0; n < shape.rows; ++n) {
              const double actual = out[static_cast<size_t>(t * shape.rows + n)];
              if (quantized.nonfinite) {
                ASSERT_TRUE(std::isnan(actual)) << "token " << t;
                continue;
              }
              double value = 0, sum_abs = 0;
              for (int64_t k = 0; k < shape.cols; ++k) {
                const double p = quantized.values[static_cast<size_t>(k)] * quantized.scale *
                                 weight_scale * w[static_cast<size_t>(n * shape.cols + k)];
                value += p;
                sum_abs += std::fabs(p);
              }
              const double half_ulp = test::oracle_half_ulp(value, dtype);
              const bool fp8_tensor_cores =
                  test::has_fp8_tensor_cores(backend()) && format == ActivationFormat::kFp8;
              const auto bound_of = fp8_tensor_cores ? fp8_tensor_core_bound : gemm_bound;
              ASSERT_NEAR(actual, value, bound_of(shape.cols, 1, sum_abs, half_ulp))
                  << "token " << t << " output " << n;
            }
          }
        }
      }
    }
  }
}

// One row of x for each k shows the weights themselves, in fp32: every code under every block scale
// under every shift. The largest scale of a matrix sets its shift. Small weights are subnormal in
// E4M3.
TEST_P(LinearOfBackend, EveryFp8Weight) {
  if (declined(ActivationFormat::kFp8)) GTEST_SKIP() << backend().name << " declines fp8";
  constexpr int64_t kCols = 32;
  std::vector<uint8_t> x(kCols * kCols * sizeof(float));
  for (size_t k = 0; k < kCols; ++k) {
    const float one = 1;
    std::memcpy(x.data() + k * (kCols + 1) * sizeof(one), &one, sizeof(one));
  }
  int64_t compared = 0;
  for (int largest = 0x7E, before = kFp8MostShift + 1; largest > 0; --largest) {
    const int shift = fp8_weight_shift(static_cast<uint8_t>(largest));
    if (shift == before) continue;  // the largest scale of each shift
    before = shift;
    // Row r: codes 0..15 under scale r, then again under the largest scale.
    const int64_t rows = largest + 1;
    std::vector<uint8_t> codes, scales;
    for (int64_t r = 0; r < rows; ++r) {
      for (int block = 0; block < 2; ++block)
        for (uint8_t pair = 0; pair < 8; ++pair)
          codes.push_back(static_cast<uint8_t>(2 * pair | (2 * pair + 1) << 4));
      scales.push_back(static_cast<uint8_t>(r));
      scales.push_back(static_cast<uint8_t>(largest));
    }
    const Linear linear(backend(), rows, kCols, ActivationFormat::kFp8, codes, scales);
    ASSERT_EQ(linear.weights.fp8.shift, shift);
    const test::OracleFp8Weights expected = test::oracle_fp8_weights(
        Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, rows, kCols));
    const std::vector<float> out = test::to_floats(
        linear.run(backend(), x, DType::kF32, kCols, DType::kF32, serial_executor()), DType::kF32);
    for (int64_t k = 0; k < kCols; ++k)
      for (int64_t r = 0; r < rows; ++r, ++compared)
        ASSERT_EQ(static_cast<double>(out[static_cast<size_t>(k * rows + r)]),
                  std::ldexp(expected.values[static_cast<size_t>(r * kCols + k)], shift))
            << "shift " << shift << " scale " << r << " code " << k % 16;
  }
  EXPECT_GT(compared, 16 * 32 * 19);
}

TEST_P(LinearOfBackend, ThreadsDoNotShow) {
  const Linear linear(backend(), 208, 128, ActivationFormat::kNvfp4,
                      ActivationScale::kDynamicToken);
  const std::vector<uint8_t> x = make_x(40, 128, DType::kBf16, true);
  const auto pool = make_thread_pool(5);
  EXPECT_EQ(test::difference(
                linear.run(backend(), x, DType::kBf16, 40, DType::kF32, serial_executor()),
                linear.run(backend(), x, DType::kBf16, 40, DType::kF32, *pool), DType::kF32, 208),
            "");
}

INSTANTIATE_TEST_SUITE_P(Backends, LinearOfBackend, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
