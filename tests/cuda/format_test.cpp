// The C interface's format functions on a GPU against those on the host, bit for bit.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/random.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "nvfp4_moe/nvfp4_moe.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kRows = 133,
                  kCols = 208;  // not a multiple of thread blocks or of swizzle tiles
constexpr size_t kCodes = kRows * kCols / 2, kScales = kRows * kCols / 16;

std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> made(values.size());
  std::memcpy(made.data(), values.data(), values.size() * sizeof(float));
  return made;
}

std::vector<float> normal(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random.normal()));
  return values;
}

class CApiOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) GTEST_SKIP() << cudaGetErrorString(error);
    if (count == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(CApiOnGpu, QuantizesAndDequantizesTheHostsBits) {
  std::vector<float> x = normal(kRows * kCols, 3);
  const OnDevice<float> device_x(x);
  struct Way {
    int32_t mode;
    float scale;
    int32_t search = NVFP4_MOE_SEARCH_MAX;
  };
  // The host's function for a way.
  const auto on_host = [&](const Way& way, uint8_t* codes, uint8_t* scales, float* tensor_scales) {
    constexpr int32_t kF32 = NVFP4_MOE_DTYPE_F32;
    switch (way.mode) {
      case NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN:
        return nvfp4_moe_quantize_dynamic_token(x.data(), kF32, kRows, kCols, codes, scales,
                                                tensor_scales, nullptr);
      case NVFP4_MOE_QUANTIZE_MODE_STATIC:
        return nvfp4_moe_quantize_static(x.data(), kF32, kRows, kCols, tensor_scales, codes, scales,
                                         nullptr);
      case NVFP4_MOE_QUANTIZE_MODE_VLLM_ORDER:
        return nvfp4_moe_quantize_vllm_order(x.data(), kF32, kRows, kCols, way.scale, codes, scales,
                                             nullptr);
      default:
        return nvfp4_moe_quantize(x.data(), kF32, kRows, kCols, way.search, tensor_scales, codes,
                                  scales, nullptr);
    }
  };
  for (const Way way :
       {Way{NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, 0.0f}, Way{NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, 0.003f},
        Way{NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, 0.0f, NVFP4_MOE_SEARCH_MSE},
        Way{NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN, 0.0f},
        Way{NVFP4_MOE_QUANTIZE_MODE_STATIC, 0x1p-9f}, Way{NVFP4_MOE_QUANTIZE_MODE_STATIC, 0.003f},
        Way{NVFP4_MOE_QUANTIZE_MODE_VLLM_ORDER, 0.0017f}}) {
    SCOPED_TRACE(way.mode);
    const bool dynamic = way.mode == NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN;
    std::vector<uint8_t> codes(kCodes), scales(kScales);
    std::vector<float> tensor_scales(dynamic ? kRows : 1, way.scale);
    ASSERT_EQ(NVFP4_MOE_STATUS_OK, on_host(way, codes.data(), scales.data(), tensor_scales.data()));
    const OnDevice<uint8_t> device_codes(kCodes), device_scales(kScales);
    const OnDevice<float> device_tensor_scales(tensor_scales.size());
    ASSERT_EQ(
        NVFP4_MOE_STATUS_OK,
        nvfp4_moe_device_quantize("cuda:0", way.mode, way.search, device_x.data(),
                                  NVFP4_MOE_DTYPE_F32, kRows, kCols, way.scale, device_codes.data(),
                                  device_scales.data(), device_tensor_scales.data(), nullptr))
        << nvfp4_moe_last_error();
    EXPECT_EQ(device_codes.back(), codes);
    EXPECT_EQ(device_scales.back(), scales);
    EXPECT_EQ(bits(device_tensor_scales.back()), bits(tensor_scales));

    const OnDevice<float> back(kRows * kCols);
    ASSERT_EQ(NVFP4_MOE_STATUS_OK,
              nvfp4_moe_device_dequantize("cuda:0", device_codes.data(), device_scales.data(),
                                          device_tensor_scales.data(), dynamic, kRows, kCols,
                                          NVFP4_MOE_DTYPE_F32, back.data(), nullptr));
    std::vector<float> expected(kRows * kCols);
    for (int64_t row = 0; row < kRows; ++row)
      ASSERT_EQ(
          NVFP4_MOE_STATUS_OK,
          nvfp4_moe_dequantize(codes.data() + row * kCols / 2, scales.data() + row * kCols / 16,
                               tensor_scales[dynamic ? static_cast<size_t>(row) : 0], 1, kCols,
                               NVFP4_MOE_DTYPE_F32, expected.data() + row * kCols));
    EXPECT_EQ(bits(back.back()), bits(expected));
  }
}

// If the host refuses or flags a number, the device's scale is NaN.
TEST_F(CApiOnGpu, NonFiniteNumbersGiveNanScales) {
  std::vector<float> x = normal(kRows * kCols, 4);
  x[5 * kCols + 7] = std::numeric_limits<float>::infinity();
  const OnDevice<float> device_x(x), row_scales(kRows), tensor_scale(1);
  const OnDevice<uint8_t> codes(kCodes), scales(kScales);
  ASSERT_EQ(NVFP4_MOE_STATUS_OK,
            nvfp4_moe_device_quantize("cuda:0", NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN,
                                      NVFP4_MOE_SEARCH_MAX, device_x.data(), NVFP4_MOE_DTYPE_F32,
                                      kRows, kCols, 0.0f, codes.data(), scales.data(),
                                      row_scales.data(), nullptr));
  const std::vector<float> rows = row_scales.back();
  for (int64_t row = 0; row < kRows; ++row)
    EXPECT_EQ(std::isnan(rows[static_cast<size_t>(row)]), row == 5) << row;
  ASSERT_EQ(
      NVFP4_MOE_STATUS_OK,
      nvfp4_moe_device_quantize("cuda:0", NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, NVFP4_MOE_SEARCH_MAX,
                                device_x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, 0.0f,
                                codes.data(), scales.data(), tensor_scale.data(), nullptr));
  EXPECT_TRUE(std::isnan(tensor_scale.back()[0]));
}

TEST_F(CApiOnGpu, SwigluQuantizesTheHostsBitsInAGraph) {
  const std::vector<float> gate_up = normal(kRows * kCols * 2, 5), weights = normal(kRows, 6);
  nvfp4_moe_swiglu options{};
  options.struct_size = sizeof options;
  options.dtype = NVFP4_MOE_DTYPE_F32;
  for (const nvfp4_moe_activation activation :
       {NVFP4_MOE_ACTIVATION_SWIGLU_CLAMPED, NVFP4_MOE_ACTIVATION_GELU,
        NVFP4_MOE_ACTIVATION_GELU_TANH, NVFP4_MOE_ACTIVATION_SITU}) {
    SCOPED_TRACE(activation);
    const bool situ = activation == NVFP4_MOE_ACTIVATION_SITU;
    options.activation = activation;
    options.swiglu_limit = activation == NVFP4_MOE_ACTIVATION_SWIGLU_CLAMPED ? 1.5f : 0.0f;
    options.situ_gate_limit = options.situ_up_limit = situ ? 1.5f : 0.0f;
    std::vector<uint8_t> codes(kCodes), scales(kScales);
    std::vector<float> row_scales(kRows);
    ASSERT_EQ(NVFP4_MOE_STATUS_OK,
              nvfp4_moe_swiglu_quantize(&options, gate_up.data(), kRows, kCols, weights.data(),
                                        codes.data(), scales.data(), row_scales.data(), nullptr));
    const OnDevice<float> device_gate_up(gate_up), device_weights(weights),
        device_row_scales(kRows);
    const OnDevice<uint8_t> device_codes(kCodes), device_scales(kScales);
    const OwnStream stream;
    const auto enqueue = [&]() -> Status {
      EXPECT_EQ(NVFP4_MOE_STATUS_OK,
                nvfp4_moe_device_swiglu_quantize(
                    "cuda:0", &options, device_gate_up.data(), kRows, kCols, device_weights.data(),
                    device_codes.data(), device_scales.data(), device_row_scales.data(), stream))
          << nvfp4_moe_last_error();
      return {};
    };
    const Graph graph(stream, enqueue, cudaStreamCaptureModeGlobal);
    graph.launch();
    stream.synchronize();
    EXPECT_EQ(device_codes.back(), codes);
    EXPECT_EQ(device_scales.back(), scales);
    EXPECT_EQ(bits(device_row_scales.back()), bits(row_scales));
  }
}

// The arrays that a captured swizzle reads and writes are determined when the graph is replayed,
// not when it is captured.
TEST_F(CApiOnGpu, SwizzlesInAGraphThatReplaysWithOtherContents) {
  constexpr int64_t kMatrices = 2, kScaleCols = 13;
  const auto bytes = static_cast<size_t>(nvfp4_moe_swizzled_bytes(kRows, kScaleCols));
  const OnDevice<uint8_t> linear(kMatrices * kRows * kScaleCols), swizzled(kMatrices * bytes),
      back(linear.back().size());
  const OwnStream stream;
  const auto enqueue = [&]() -> Status {
    EXPECT_EQ(NVFP4_MOE_STATUS_OK,
              nvfp4_moe_device_swizzle_scales("cuda:0", linear.data(), kMatrices, kRows, kScaleCols,
                                              swizzled.data(), stream));
    EXPECT_EQ(NVFP4_MOE_STATUS_OK,
              nvfp4_moe_device_unswizzle_scales("cuda:0", swizzled.data(), kMatrices, kRows,
                                                kScaleCols, back.data(), stream));
    return {};
  };
  const Graph graph(stream, enqueue, cudaStreamCaptureModeGlobal);
  for (uint64_t seed : {11, 12, 13}) {
    Random random(seed);
    std::vector<uint8_t> contents, expected(kMatrices * bytes);
    for (size_t i = 0; i < kMatrices * kRows * kScaleCols; ++i)
      contents.push_back(static_cast<uint8_t>(random.below(256)));
    for (int64_t i = 0; i < kMatrices; ++i)
      ASSERT_EQ(
          NVFP4_MOE_STATUS_OK,
          nvfp4_moe_swizzle_scales(contents.data() + i * kRows * kScaleCols, kRows, kScaleCols,
                                   expected.data() + static_cast<size_t>(i) * bytes));
    ASSERT_CUDA(
        cudaMemcpy(linear.data(), contents.data(), contents.size(), cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaMemset(swizzled.data(), 0xA5, expected.size()));
    ASSERT_CUDA(cudaMemset(back.data(), 0xA5, contents.size()));
    ASSERT_CUDA(cudaDeviceSynchronize());
    graph.launch();
    stream.synchronize();
    EXPECT_EQ(swizzled.back(), expected) << seed;
    EXPECT_EQ(back.back(), contents) << seed;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
