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

bool same_float(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

class RouterGemmOnADevice : public BackendTest {
 protected:
  void expect_the_hosts_bits(const GemmShape& shape, DType dtype, bool special = false) {
    SCOPED_TRACE(testing::Message() << shape.tokens << " tokens, " << shape.experts << " experts, "
                                    << shape.hidden_size << " wide, padding " << shape.padding
                                    << ", " << to_string(dtype));
    const DeviceMemory& memory = *backend().memory;
    const int64_t stride = shape.hidden_size + shape.padding, count = shape.tokens * shape.experts;
    const auto hidden = bf16s(shape.tokens * stride, 3, special),
               weight = bf16s(shape.experts * shape.hidden_size, 4, false);
    const auto bytes = static_cast<size_t>(count * bits(dtype) / 8);
    constexpr size_t kGuard = 64;
    std::vector<uint8_t> expected(bytes), actual(bytes + kGuard, 0xA5);
    auto device_hidden = memory.allocate(hidden.size() * 2, 0, "hidden");
    auto device_weight = memory.allocate(weight.size() * 2, 0, "weight");
    auto device_logits = memory.allocate(actual.size(), 0, "logits");
    ASSERT_TRUE(device_hidden.ok() && device_weight.ok() && device_logits.ok());
    ASSERT_OK(
        memory.to_device(0, device_hidden->data(), hidden.data(), hidden.size() * 2, nullptr));
    ASSERT_OK(
        memory.to_device(0, device_weight->data(), weight.data(), weight.size() * 2, nullptr));
    ASSERT_OK(memory.to_device(0, device_logits->data(), actual.data(), actual.size(), nullptr));
    std::vector<uint16_t> aligned(weight.size() + 8), aligned_hidden(hidden.size() + 8);
    const auto place = [](std::vector<uint16_t>& at, const std::vector<uint16_t>& from) {
      auto* const to =
          reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(at.data()) + 15) / 16 * 16);
      std::memcpy(to, from.data(), from.size() * 2);
      return to;
    };
    RouterGemm call;
    call.tokens = shape.tokens;
    call.num_experts = shape.experts;
    call.hidden_size = shape.hidden_size;
    call.hidden_stride = stride;
    call.logits_dtype = dtype;
    RouterGemm on_device = call;
    call.hidden = place(aligned_hidden, hidden);
    call.weight = place(aligned, weight);
    call.logits = expected.data();
    on_device.hidden = device_hidden->data();
    on_device.weight = device_weight->data();
    on_device.logits = device_logits->data();
    router_gemm(call);
    ASSERT_OK(router::device_router_gemm(0, on_device, nullptr));
    ASSERT_OK(memory.to_host(0, actual.data(), device_logits->data(), actual.size(), nullptr));
    for (size_t i = bytes; i < actual.size(); ++i)
      ASSERT_EQ(actual[i], 0xA5) << "written beyond the logits";
    for (int64_t i = 0; i < count; ++i) {
      float e, a;
      to_floats(expected.data() + i * (bits(dtype) / 8), dtype, 1, &e);
      to_floats(actual.data() + i * (bits(dtype) / 8), dtype, 1, &a);
      ASSERT_TRUE(same_float(e, a)) << "logit " << i << ": " << a << ", expected " << e;
    }
  }
};

// Few and small enough for compute-sanitizer.
TEST_P(RouterGemmOnADevice, AFewTokens) {
  for (const int64_t tokens : {1, 2, 3, 5, 8, 9})
    expect_the_hosts_bits({tokens, 3, 1048, 8}, DType::kBf16);
}

TEST_P(RouterGemmOnADevice, OfEveryWidth) {
  for (const int64_t size : {8, 512, 1024, 2048, 3080, 7168, 8192, 8200, 17000})
    for (const int64_t tokens : {1, 4, 11})
      expect_the_hosts_bits({tokens, 2, size, 0}, DType::kF32);
}

TEST_P(RouterGemmOnADevice, OfManyExpertsAndTokens) {
  expect_the_hosts_bits({1, 1024, 64, 0}, DType::kBf16);
  expect_the_hosts_bits({130, 16, 72, 24}, DType::kF32);
}

TEST_P(RouterGemmOnADevice, WhatIsNotFinite) {
  for (const int64_t tokens : {1, 2, 4, 8})
    expect_the_hosts_bits({tokens, 6, 2048, 0}, DType::kF32, true);
}

TEST_P(RouterGemmOnADevice, InAGraphBehindWhatMakesHidden) {
  const DeviceMemory& memory = *backend().memory;
  constexpr int64_t kSize = 2048, kExperts = 8;
  const auto weight = bf16s(kExperts * kSize, 4, false);
  auto hidden = memory.allocate(kSize * 2, 0, "hidden"),
       source = memory.allocate(kSize * 2, 0, "source"),
       device_weight = memory.allocate(weight.size() * 2, 0, "weight"),
       logits = memory.allocate(kExperts * 4, 0, "logits");
  ASSERT_TRUE(hidden.ok() && source.ok() && device_weight.ok() && logits.ok());
  ASSERT_OK(memory.to_device(0, device_weight->data(), weight.data(), weight.size() * 2, nullptr));
  RouterGemm call{
      1,          kExperts, kSize, hidden->data(), kSize, device_weight->data(), logits->data(),
      DType::kF32};
  const OwnStream stream;
  const Graph graph(stream, [&] {
    EXPECT_EQ(cudaMemcpyAsync(hidden->data(), source->data(), kSize * 2, cudaMemcpyDeviceToDevice,
                              stream),
              cudaSuccess);
    return router::device_router_gemm(0, call, stream);
  });
  ASSERT_OK(graph.status());
  alignas(16) uint16_t own[kSize];
  std::vector<uint16_t> aligned(weight.size() + 8);
  auto* const host_weight =
      reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(aligned.data()) + 15) / 16 * 16);
  std::memcpy(host_weight, weight.data(), weight.size() * 2);
  for (uint64_t seed = 10; seed < 14; ++seed) {
    const auto values = bf16s(kSize, seed, false);
    std::memcpy(own, values.data(), sizeof own);
    std::vector<float> expected(kExperts), actual(kExperts);
    router_gemm({1, kExperts, kSize, own, kSize, host_weight, expected.data(), DType::kF32});
    ASSERT_OK(memory.to_device(0, source->data(), own, sizeof own, nullptr));
    graph.launch();
    stream.synchronize();
    ASSERT_OK(memory.to_host(0, actual.data(), logits->data(), kExperts * 4, nullptr));
    EXPECT_EQ(actual, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, RouterGemmOnADevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
