// The C interface's format functions on a GPU against those on the host, bit for bit.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/random.h"
#include "cuda/graph.h"
#include "nvfp4_moe/nvfp4_moe.h"

namespace nvfp4_moe::internal {
namespace {

#define ASSERT_CUDA(...) ASSERT_EQ(cudaSuccess, (__VA_ARGS__)) << cudaGetErrorString(cudaGetLastError())

constexpr int64_t kRows = 133, kCols = 208;  // a ragged count of blocks of threads and of swizzle tiles
constexpr size_t kCodes = kRows * kCols / 2, kScales = kRows * kCols / 16;

template <class T>
class OnGpu {
 public:
  explicit OnGpu(size_t count) : count_(count) { EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T)), cudaSuccess); }
  explicit OnGpu(const std::vector<T>& host) : OnGpu(host.size()) {
    EXPECT_EQ(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data_); }
  T* get() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> copy(count_);
    EXPECT_EQ(cudaMemcpy(copy.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return copy;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

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

class CApiOnGpu : public ::testing::Test {
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
  const OnGpu<float> device_x(x);
  struct Way {
    int32_t mode;
    float scale;
    int32_t search = NVFP4_MOE_SEARCH_MAX;
  };
  for (const Way way : {Way{NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, 0.0f}, Way{NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, 0.003f},
                        Way{NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, 0.0f, NVFP4_MOE_SEARCH_MSE},
                        Way{NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN, 0.0f}, Way{NVFP4_MOE_QUANTIZE_MODE_STATIC, 0x1p-9f},
                        Way{NVFP4_MOE_QUANTIZE_MODE_STATIC, 0.003f}, Way{NVFP4_MOE_QUANTIZE_MODE_COMPAT, 0.0017f}}) {
    const bool dynamic = way.mode == NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN;
    std::vector<uint8_t> codes(kCodes), scales(kScales);
    std::vector<float> tensor_scales(dynamic ? kRows : 1, way.scale);
    switch (way.mode) {
      case NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN:
        ASSERT_EQ(NVFP4_MOE_STATUS_OK,
                  nvfp4_moe_quantize_dynamic_token(x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, codes.data(),
                                                   scales.data(), tensor_scales.data(), nullptr));
        break;
      case NVFP4_MOE_QUANTIZE_MODE_STATIC:
        ASSERT_EQ(NVFP4_MOE_STATUS_OK,
                  nvfp4_moe_quantize_static(x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, tensor_scales.data(),
                                            codes.data(), scales.data(), nullptr));
        break;
      case NVFP4_MOE_QUANTIZE_MODE_COMPAT:
        ASSERT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_quantize_compat(x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, way.scale,
                                                                 codes.data(), scales.data(), nullptr));
        break;
      default:
        ASSERT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_quantize(x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, way.search,
                                                          tensor_scales.data(), codes.data(), scales.data(), nullptr));
    }
    const OnGpu<uint8_t> device_codes(kCodes), device_scales(kScales);
    const OnGpu<float> device_tensor_scales(tensor_scales.size());
    ASSERT_EQ(NVFP4_MOE_STATUS_OK,
              nvfp4_moe_device_quantize("cuda:0", way.mode, way.search, device_x.get(), NVFP4_MOE_DTYPE_F32, kRows,
                                        kCols, way.scale, device_codes.get(), device_scales.get(),
                                        device_tensor_scales.get(), nullptr))
        << nvfp4_moe_last_error();
    EXPECT_EQ(device_codes.host(), codes) << way.mode;
    EXPECT_EQ(device_scales.host(), scales) << way.mode;
    EXPECT_EQ(bits(device_tensor_scales.host()), bits(tensor_scales)) << way.mode;

    const OnGpu<float> back(kRows * kCols);
    ASSERT_EQ(NVFP4_MOE_STATUS_OK,
              nvfp4_moe_device_dequantize("cuda:0", device_codes.get(), device_scales.get(), device_tensor_scales.get(),
                                          dynamic, kRows, kCols, NVFP4_MOE_DTYPE_F32, back.get(), nullptr));
    std::vector<float> expected(kRows * kCols);
    for (int64_t row = 0; row < kRows; ++row)
      ASSERT_EQ(NVFP4_MOE_STATUS_OK,
                nvfp4_moe_dequantize(codes.data() + row * kCols / 2, scales.data() + row * kCols / 16,
                                     tensor_scales[dynamic ? static_cast<size_t>(row) : 0], 1, kCols,
                                     NVFP4_MOE_DTYPE_F32, expected.data() + row * kCols));
    EXPECT_EQ(bits(back.host()), bits(expected)) << way.mode;
  }
}

// Where the host refuses or flags a number, the device's scale is NaN.
TEST_F(CApiOnGpu, NonFiniteNumbersGiveNanScales) {
  std::vector<float> x = normal(kRows * kCols, 4);
  x[5 * kCols + 7] = std::numeric_limits<float>::infinity();
  const OnGpu<float> device_x(x), row_scales(kRows), tensor_scale(1);
  const OnGpu<uint8_t> codes(kCodes), scales(kScales);
  ASSERT_EQ(NVFP4_MOE_STATUS_OK,
            nvfp4_moe_device_quantize("cuda:0", NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN, NVFP4_MOE_SEARCH_MAX,
                                      device_x.get(), NVFP4_MOE_DTYPE_F32, kRows, kCols, 0.0f, codes.get(),
                                      scales.get(), row_scales.get(), nullptr));
  const std::vector<float> rows = row_scales.host();
  for (int64_t row = 0; row < kRows; ++row) EXPECT_EQ(std::isnan(rows[static_cast<size_t>(row)]), row == 5) << row;
  ASSERT_EQ(NVFP4_MOE_STATUS_OK,
            nvfp4_moe_device_quantize("cuda:0", NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, NVFP4_MOE_SEARCH_MAX, device_x.get(),
                                      NVFP4_MOE_DTYPE_F32, kRows, kCols, 0.0f, codes.get(), scales.get(),
                                      tensor_scale.get(), nullptr));
  EXPECT_TRUE(std::isnan(tensor_scale.host()[0]));
}

TEST_F(CApiOnGpu, SwigluQuantizesTheHostsBitsInAGraph) {
  const std::vector<float> gate_up = normal(kRows * kCols * 2, 5), weights = normal(kRows, 6);
  nvfp4_moe_swiglu options{};
  options.struct_size = sizeof options;
  options.activation = NVFP4_MOE_ACTIVATION_SWIGLU_CLAMPED;
  options.swiglu_limit = 1.5f;
  options.dtype = NVFP4_MOE_DTYPE_F32;
  std::vector<uint8_t> codes(kCodes), scales(kScales);
  std::vector<float> row_scales(kRows);
  ASSERT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_swiglu_quantize(&options, gate_up.data(), kRows, kCols, weights.data(),
                                                           codes.data(), scales.data(), row_scales.data(), nullptr));
  const OnGpu<float> device_gate_up(gate_up), device_weights(weights), device_row_scales(kRows);
  const OnGpu<uint8_t> device_codes(kCodes), device_scales(kScales);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  const auto enqueue = [&]() -> Status {
    EXPECT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_device_swiglu_quantize(
                                       "cuda:0", &options, device_gate_up.get(), kRows, kCols, device_weights.get(),
                                       device_codes.get(), device_scales.get(), device_row_scales.get(), stream))
        << nvfp4_moe_last_error();
    return {};
  };
  const test::Graph graph(stream, enqueue, cudaStreamCaptureModeGlobal);
  graph.launch();
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(device_codes.host(), codes);
  EXPECT_EQ(device_scales.host(), scales);
  EXPECT_EQ(bits(device_row_scales.host()), bits(row_scales));
  cudaStreamDestroy(stream);
}

TEST_F(CApiOnGpu, SwizzlesTheHostsBytesAndBack) {
  constexpr int64_t kMatrices = 3, kScaleCols = 13;
  Random random(7);
  std::vector<uint8_t> linear;
  for (int64_t i = 0; i < kMatrices * kRows * kScaleCols; ++i)
    linear.push_back(static_cast<uint8_t>(random.below(256)));
  const auto bytes = static_cast<size_t>(nvfp4_moe_swizzled_bytes(kRows, kScaleCols));
  std::vector<uint8_t> swizzled(kMatrices * bytes);
  for (int64_t i = 0; i < kMatrices; ++i)
    ASSERT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_swizzle_scales(linear.data() + i * kRows * kScaleCols, kRows, kScaleCols,
                                                            swizzled.data() + static_cast<size_t>(i) * bytes));
  const OnGpu<uint8_t> device_linear(linear), device_swizzled(swizzled.size()), back(linear.size());
  ASSERT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_device_swizzle_scales("cuda:0", device_linear.get(), kMatrices, kRows,
                                                                 kScaleCols, device_swizzled.get(), nullptr));
  EXPECT_EQ(device_swizzled.host(), swizzled);
  ASSERT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_device_unswizzle_scales("cuda:0", device_swizzled.get(), kMatrices, kRows,
                                                                   kScaleCols, back.get(), nullptr));
  EXPECT_EQ(back.host(), linear);
}

// What a captured swizzle reads and writes is found out when the graph is replayed, not when it is captured.
TEST_F(CApiOnGpu, SwizzlesInAGraphThatReplaysWithOtherContents) {
  constexpr int64_t kMatrices = 2, kScaleCols = 13;
  const auto bytes = static_cast<size_t>(nvfp4_moe_swizzled_bytes(kRows, kScaleCols));
  const OnGpu<uint8_t> linear(kMatrices * kRows * kScaleCols), swizzled(kMatrices * bytes), back(linear.host().size());
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  const auto enqueue = [&]() -> Status {
    EXPECT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_device_swizzle_scales("cuda:0", linear.get(), kMatrices, kRows, kScaleCols,
                                                                   swizzled.get(), stream));
    EXPECT_EQ(NVFP4_MOE_STATUS_OK, nvfp4_moe_device_unswizzle_scales("cuda:0", swizzled.get(), kMatrices, kRows,
                                                                     kScaleCols, back.get(), stream));
    return {};
  };
  const test::Graph graph(stream, enqueue, cudaStreamCaptureModeGlobal);
  for (uint64_t seed : {11, 12, 13}) {
    Random random(seed);
    std::vector<uint8_t> contents, expected(kMatrices * bytes);
    for (size_t i = 0; i < kMatrices * kRows * kScaleCols; ++i)
      contents.push_back(static_cast<uint8_t>(random.below(256)));
    for (int64_t i = 0; i < kMatrices; ++i)
      ASSERT_EQ(NVFP4_MOE_STATUS_OK,
                nvfp4_moe_swizzle_scales(contents.data() + i * kRows * kScaleCols, kRows, kScaleCols,
                                         expected.data() + static_cast<size_t>(i) * bytes));
    ASSERT_CUDA(cudaMemcpy(linear.get(), contents.data(), contents.size(), cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaMemset(swizzled.get(), 0xA5, expected.size()));
    ASSERT_CUDA(cudaMemset(back.get(), 0xA5, contents.size()));
    ASSERT_CUDA(cudaDeviceSynchronize());
    graph.launch();
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(swizzled.host(), expected) << seed;
    EXPECT_EQ(back.host(), contents) << seed;
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace nvfp4_moe::internal
