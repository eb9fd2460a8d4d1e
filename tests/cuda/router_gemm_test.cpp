// A router's GEMM on a GPU: bit for bit the host's, for every code path over tokens and rows.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/float_formats.h"
#include "core/random.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "moe/router.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

struct GemmShape {
  int64_t tokens, experts, hidden_size, padding;
};

// bf16 of many magnitudes; if special, also zeros of both signs, Inf and NaN.
std::vector<uint16_t> bf16s(int64_t count, uint64_t seed, bool special) {
  Random random(seed);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  const float strange[] = {0.0f, -0.0f, std::numeric_limits<float>::infinity(), std::nanf("")};
  for (uint16_t& x : values) {
    const float value = std::ldexp(static_cast<float>(random.below(512)) - 256.0f,
                                   static_cast<int>(random.below(9)) - 12);
    x = bf16_from_float(special && random.below(400) == 0 ? strange[random.below(4)] : value);
  }
  return values;
}

// A copy at an address that is a multiple of 16.
class Aligned {
 public:
  explicit Aligned(const std::vector<uint16_t>& values)
      : pages_(*allocate_pages(values.size() * 2)) {
    std::memcpy(pages_.data(), values.data(), values.size() * 2);
  }
  const std::byte* data() const { return pages_.data(); }

 private:
  Buffer pages_;
};

class RouterGemmOnADevice : public BackendTest {
 protected:
  void expect_the_hosts_bits(const GemmShape& shape, DType dtype, bool special = false) {
    SCOPED_TRACE(testing::Message() << shape.tokens << " tokens, " << shape.experts << " experts, "
                                    << shape.hidden_size << " wide, padding " << shape.padding
                                    << ", " << to_string(dtype));
    const int64_t stride = shape.hidden_size + shape.padding, count = shape.tokens * shape.experts;
    const auto hidden = bf16s(shape.tokens * stride, 3, special),
               weight = bf16s(shape.experts * shape.hidden_size, 4, false);
    const auto bytes = static_cast<size_t>(count * bits(dtype) / 8);
    constexpr size_t kGuard = 64;
    std::vector<uint8_t> expected(bytes);
    const OnDevice<uint16_t> device_hidden(hidden), device_weight(weight);
    const OnDevice<uint8_t> logits(std::vector<uint8_t>(bytes + kGuard, 0xA5));
    const RouterGemm on_device{shape.tokens,         shape.experts, shape.hidden_size,
                               device_hidden.data(), stride,        device_weight.data(),
                               logits.data(),        dtype};
    const Aligned host_hidden(hidden), host_weight(weight);
    RouterGemm call = on_device;
    call.hidden = host_hidden.data();
    call.weight = host_weight.data();
    call.logits = expected.data();
    router_gemm(call);
    ASSERT_OK(router::device_router_gemm(0, on_device, nullptr));
    std::vector<uint8_t> actual = logits.back();
    for (size_t i = bytes; i < actual.size(); ++i)
      ASSERT_EQ(actual[i], 0xA5) << "written beyond the logits";
    actual.resize(bytes);
    EXPECT_EQ(difference(expected, actual, dtype, shape.experts), "");
  }
};

// Few and small enough for compute-sanitizer.
TEST_P(RouterGemmOnADevice, AFewTokens) {
  for (const int64_t tokens : {1, 2, 3, 5, 8, 9})
    expect_the_hosts_bits({tokens, 3, 1048, 8}, DType::kBf16);
}

TEST_P(RouterGemmOnADevice, EveryShape) {
  for (const int64_t size : {8, 512, 1024, 2048, 3080, 7168, 8192, 8200, 17000})
    for (const int64_t tokens : {1, 4, 11})
      expect_the_hosts_bits({tokens, 2, size, 0}, DType::kF32);
  for (const int64_t tokens : {1, 2, 4, 8})
    expect_the_hosts_bits({tokens, 6, 2048, 0}, DType::kF32, true);
  expect_the_hosts_bits({1, 1024, 64, 0}, DType::kBf16);
  expect_the_hosts_bits({130, 16, 72, 24}, DType::kF32);
}

TEST_P(RouterGemmOnADevice, InAGraphBehindWhatMakesHidden) {
  constexpr int64_t kSize = 2048, kExperts = 8;
  const auto weight = bf16s(kExperts * kSize, 4, false);
  const OnDevice<uint16_t> hidden(kSize), source(kSize), device_weight(weight);
  const OnDevice<float> logits(kExperts);
  RouterGemm call{
      1, kExperts, kSize, hidden.data(), kSize, device_weight.data(), logits.data(), DType::kF32};
  const OwnStream stream;
  const Graph graph(stream, [&] {
    EXPECT_EQ(
        cudaMemcpyAsync(hidden.data(), source.data(), kSize * 2, cudaMemcpyDeviceToDevice, stream),
        cudaSuccess);
    return router::device_router_gemm(0, call, stream);
  });
  ASSERT_OK(graph.status());
  const Aligned host_weight(weight);
  for (uint64_t seed = 10; seed < 13; ++seed) {
    const Aligned own(bf16s(kSize, seed, false));
    std::vector<float> expected(kExperts);
    router_gemm(
        {1, kExperts, kSize, own.data(), kSize, host_weight.data(), expected.data(), DType::kF32});
    ASSERT_CUDA(cudaMemcpy(source.data(), own.data(), kSize * 2, cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaDeviceSynchronize());
    graph.launch();
    stream.synchronize();
    EXPECT_EQ(logits.back(), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, RouterGemmOnADevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
