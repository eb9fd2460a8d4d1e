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

// Bytes of random codes, and of block scales between 0.5 and 3.75.
std::vector<uint8_t> random_bytes(int64_t count, bool scales) {
  Random random(static_cast<uint64_t>(count));
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (uint8_t& byte : bytes)
    byte = static_cast<uint8_t>(scales ? 0x30 + random.below(0x18) : random.below(256));
  return bytes;
}

struct Linear {
  LinearWeights weights;
  std::vector<uint8_t> codes, block_scales;

  Linear(const Backend& backend, int64_t rows, int64_t cols, ActivationFormat format,
         ActivationScale scale)
      : Linear(backend, rows, cols, format, scale, random_bytes(rows * cols / 2, false),
               random_bytes(rows * cols / 16, true), 5.3f / 2688) {}
  // Uses these codes and block scales.
  Linear(const Backend& backend, int64_t rows, int64_t cols, ActivationFormat format,
         ActivationScale scale, std::vector<uint8_t> codes_, std::vector<uint8_t> block_scales_,
         float tensor_scale)
      : codes(std::move(codes_)), block_scales(std::move(block_scales_)) {
    weights.rows = rows;
    weights.cols = cols;
    weights.tensor_scale = tensor_scale;
    weights.activation_format = format;
    weights.activation_scale = scale;
    if (scale == ActivationScale::kStatic) weights.input_scale = 0x1p-8f;
    if (scale == ActivationScale::kVllmOrder) weights.input_scale = 0.0019f;
    auto bytes = backend.allocate(backend.linear_bytes(rows, cols), 0, "packed weights");
    EXPECT_OK(bytes);
    weights.bytes = std::move(*bytes);
    EXPECT_OK(backend.linear_pack(weights, view()));
  }
  Nvfp4View view() const {
    return Nvfp4View::contiguous(codes.data(), block_scales.data(), weights.tensor_scale,
                                 weights.rows, weights.cols);
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

// One token, quantized by the contract.
test::OracleRow quantized(const std::vector<double>& x, const LinearWeights& weights) {
  switch (weights.activation_format) {
    case ActivationFormat::kNvfp4:
      return test::oracle_quantize(x, weights.input_scale,
                                   weights.activation_scale == ActivationScale::kVllmOrder);
    case ActivationFormat::kInt8Block: return test::oracle_quantize_int8(x);
    case ActivationFormat::kFp8: return test::oracle_quantize_fp8(x, weights.input_scale);
    case ActivationFormat::kBf16: break;
  }
  test::OracleRow row;
  for (const double value : x) {
    row.nonfinite = row.nonfinite || !std::isfinite(value);
    row.values.push_back(static_cast<double>(test::oracle_round(value, DType::kBf16)));
  }
  return row;
}

class LinearOfBackend : public test::BackendTest {
 protected:
  // Queried with the smallest layer of the same activations.
  bool declined(ActivationFormat format) const {
    MoeOptions smallest = test::sizes_of(1, 1, 16, 16);
    smallest.activation_format = format;
    return test::declines(backend(), *MoeConfig::make(smallest));
  }

  // Every output within the contract's bound around its exact value.
  void expect_exact(const Linear& linear, const std::vector<uint8_t>& x, DType dtype,
                    int64_t tokens) const {
    const LinearWeights& weights = linear.weights;
    const int64_t rows = weights.rows, cols = weights.cols;
    const bool fp8 = weights.activation_format == ActivationFormat::kFp8;
    static const auto threads = make_thread_pool(3);
    const std::vector<float> out =
        test::to_floats(linear.run(backend(), x, dtype, tokens, dtype, *threads), dtype);
    const std::vector<float> values = test::to_floats(x, dtype);
    const test::OracleFp8Weights rounded = test::oracle_fp8_weights(linear.view());
    const std::vector<double> w =
        fp8 ? rounded.values
            : test::oracle_decode(linear.codes.data(), linear.block_scales.data(), rows, cols);
    const double weight_scale = std::ldexp(double{weights.tensor_scale}, fp8 ? rounded.shift : 0);
    if (fp8) {
      EXPECT_EQ(weights.fp8, (Fp8Weights{rounded.shift, rounded.inexact}));
    }
    const auto bound_of =
        fp8 && test::has_fp8_tensor_cores(backend()) ? fp8_tensor_core_bound : gemm_bound;
    for (int64_t t = 0; t < tokens; ++t) {
      const test::OracleRow row =
          quantized({values.begin() + t * cols, values.begin() + (t + 1) * cols}, weights);
      for (int64_t n = 0; n < rows; ++n) {
        const double actual = out[static_cast<size_t>(t * rows + n)];
        double exact = 0, sum_abs = 0;
        for (int64_t k = 0; k < cols && !row.nonfinite; ++k) {
          const double p = row.values[static_cast<size_t>(k)] * row.scale * weight_scale *
                           w[static_cast<size_t>(n * cols + k)];
          exact += p;
          sum_abs += std::fabs(p);
        }
        const double bound = bound_of(cols, 1, sum_abs, test::oracle_half_ulp(exact, dtype));
        ASSERT_TRUE(row.nonfinite ? std::isnan(actual) : std::fabs(actual - exact) <= bound)
            << "token " << t << " output " << n << ": expected " << exact << ", got " << actual;
      }
    }
  }
};

TEST_P(LinearOfBackend, LiesWithinTheBoundOfTheExactValue) {
  const struct {
    int64_t rows, cols, tokens;
  } shapes[] = {{48, 80, 1}, {80, 208, 5}, {33, 64, 17}, {96, 128, 34}};
  for (const ActivationFormat format : test::kActivationFormats)
    for (const ActivationScale scale :
         {ActivationScale::kDynamicToken, ActivationScale::kStatic, ActivationScale::kVllmOrder}) {
      if (declined(format) || !check_scale_option(format, scale).ok()) continue;
      for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32})
        for (const auto& [rows, cols, tokens] : shapes) {
          SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(scale) + " " +
                       to_string(dtype) + " " + std::to_string(rows) + "x" + std::to_string(cols));
          const Linear linear(backend(), rows, cols, format, scale);
          expect_exact(linear, make_x(tokens, cols, dtype, tokens > 2), dtype, tokens);
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
    const Linear linear(backend(), rows, kCols, ActivationFormat::kFp8,
                        ActivationScale::kDynamicToken, codes, scales, 1.0f);
    ASSERT_EQ(linear.weights.fp8.shift, shift);
    const test::OracleFp8Weights expected = test::oracle_fp8_weights(linear.view());
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

INSTANTIATE_TEST_SUITE_P(Backends, LinearOfBackend, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
