// A router's GEMM on the host against float64, and its argument checks, shared by the host, a
// device and the C interface.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "core/random.h"
#include "moe/router.h"
#include "nvfp4_moe/nvfp4_moe.hpp"
#include "support/support.h"

namespace nvfp4_moe::internal::router {
namespace {

using testing::HasSubstr;

struct alignas(16) Vector {
  uint16_t at[kRouterVector];
};

// bf16 in [-2, 2), aligned as the calls require.
struct Bf16s {
  explicit Bf16s(int64_t count, uint64_t seed) : vectors(static_cast<size_t>((count + 7) / 8)) {
    Random random(seed);
    for (Vector& vector : vectors)
      for (uint16_t& x : vector.at)
        x = bf16_from_float(static_cast<float>(random.below(4096)) / 1024.0f - 2.0f);
  }
  uint16_t* data() { return vectors.front().at; }
  std::vector<Vector> vectors;
};

struct Problem {
  Problem(int64_t tokens, int64_t experts, int64_t size, int64_t padding = 0)
      : hidden(tokens * (size + padding), 1),
        weight(experts * size, 2),
        bf16(static_cast<size_t>(tokens * experts)),
        f32(static_cast<size_t>(tokens * experts)) {
    call.tokens = tokens;
    call.num_experts = experts;
    call.hidden_size = size;
    call.hidden = hidden.data();
    call.hidden_stride = size + padding;
    call.weight = weight.data();
    call.logits = f32.data();
    call.logits_dtype = DType::kF32;
  }
  Bf16s hidden, weight;
  std::vector<uint16_t> bf16;
  std::vector<float> f32;
  RouterGemm call;
};

// An accumulator adds at most ceil(H / 1024) products, the first of them exactly, and 10 halvings
// follow. A product's relative error is at most the number of these additions, in units of 2^-24
// and to first order; 1 % covers the rest.
TEST(RouterGemmOnTheHost, LiesWithinTheBoundOfItsAdditions) {
  for (const int64_t size : {8, 120, 1024, 1032, 2048, 7168, 9000}) {
    Problem p(3, 5, size, 16);
    ASSERT_TRUE(router::router_gemm(p.call).ok());
    const double additions = static_cast<double>((size + 1023) / 1024 - 1 + 10);
    double largest = 0;
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t e = 0; e < 5; ++e) {
        double exact = 0, magnitude = 0;
        for (int64_t k = 0; k < size; ++k) {
          const double product =
              static_cast<double>(bf16_to_float(p.hidden.data()[t * (size + 16) + k])) *
              static_cast<double>(bf16_to_float(p.weight.data()[e * size + k]));
          exact += product;
          magnitude += std::abs(product);
        }
        const double error =
            std::abs(static_cast<double>(p.f32[static_cast<size_t>(t * 5 + e)]) - exact);
        EXPECT_LE(error, 1.01 * additions * 0x1p-24 * magnitude) << size;
        largest = std::max(largest, error);
      }
    if (size > 1024) {
      EXPECT_GT(largest, 0.0)
          << "sums of that many products are rounded, or nothing was added in fp32";
    }
  }
}

// A logit does not depend on the other tokens of the batch; in bf16 it depends on the fp32 sum
// only.
TEST(RouterGemmOnTheHost, ATokenHasItsBitsInEveryBatch) {
  Problem p(9, 40, 2056);
  ASSERT_TRUE(router::router_gemm(p.call).ok());
  const std::vector<float> together = p.f32;
  RouterGemm one = p.call;
  one.tokens = 1;
  for (int64_t t = 0; t < 9; ++t) {
    one.hidden = p.hidden.data() + t * 2056;
    one.logits = p.f32.data();
    ASSERT_TRUE(router::router_gemm(one).ok());
    EXPECT_TRUE(std::equal(p.f32.begin(), p.f32.begin() + 40, together.begin() + t * 40)) << t;
  }
  p.call.logits = p.bf16.data();
  p.call.logits_dtype = DType::kBf16;
  ASSERT_TRUE(router::router_gemm(p.call).ok());
  for (size_t i = 0; i < together.size(); ++i) EXPECT_EQ(p.bf16[i], bf16_from_float(together[i]));
}

// The order is the documented one: only in that order do these sums lose exactly these numbers.
TEST(RouterGemmOnTheHost, AddsInTheDocumentedOrder) {
  Problem p(1, 1, 2048);
  std::fill(p.hidden.vectors.begin(), p.hidden.vectors.end(), Vector{});
  for (Vector& v : p.weight.vectors)
    std::fill(std::begin(v.at), std::end(v.at), bf16_from_float(1.0f));
  const auto expect = [&](std::initializer_list<std::pair<int, float>> values, float sum) {
    for (const auto& [k, value] : values) p.hidden.data()[k] = bf16_from_float(value);
    EXPECT_OK(router::router_gemm(p.call));
    EXPECT_EQ(p.f32[0], sum);
    for (const auto& [k, value] : values) p.hidden.data()[k] = 0;
  };
  expect({{0, 0x1p30f}, {1024, 1.0f}, {4, -0x1p30f}},
         0.0f);  // 1024 is added to accumulator 0 before its neighbours are
  expect({{0, 0x1p30f}, {4, -0x1p30f}, {1, 1.0f}}, 1.0f);  // i + 4 before i + 1
  expect({{0, 0x1p30f}, {2, 1.0f}, {4, -0x1p30f}, {6, 1.0f}}, 2.0f);
  expect({{0, 0x1p30f}, {128, -0x1p30f}, {8, 1.0f}}, 1.0f);    // lanes 16 apart before neighbours
  expect({{0, 0x1p30f}, {8, 1.0f}, {256, -0x1p30f}}, 0.0f);    // lanes before quarters
  expect({{0, 0x1p30f}, {512, -0x1p30f}, {256, 1.0f}}, 1.0f);  // quarters 2 apart before neighbours
}

struct NotedGemm {
  int calls = 0, device = -1;
  void* stream = nullptr;
  RouterGemm call;
};
NotedGemm noted_gemm;
constexpr DeviceRouter kNotingGemm = {
    .router_gemm = [](int device, const RouterGemm& call, void* stream) -> Status {
      noted_gemm = {noted_gemm.calls + 1, device, stream, call};
      return {};
    },
    .select_experts = nullptr};

TEST(RouterGemmFront, OneMistakeOneText) {
  noted_gemm = {};
  Problem p(3, 4, 16);
  std::fill(p.f32.begin(), p.f32.end(), -7.0f);
  const struct {
    const char* expected;
    std::function<void(RouterGemm&)> mistake;
  } mistakes[] = {
      {"tokens: expected 0 to 1073741824, got -1", [](auto& c) { c.tokens = -1; }},
      {"num_experts: expected 1 to 1024, got 0", [](auto& c) { c.num_experts = 0; }},
      {"num_experts: expected 1 to 1024, got 1025", [](auto& c) { c.num_experts = 1025; }},
      {"hidden_size: expected 8 to 1048576, got 0", [](auto& c) { c.hidden_size = 0; }},
      {"hidden_size: expected a multiple of 8, got 12", [](auto& c) { c.hidden_size = 12; }},
      {"hidden_stride: expected a multiple of 8, got 20", [](auto& c) { c.hidden_stride = 20; }},
      {"hidden_stride: expected 0 to 1073741824, got -16", [](auto& c) { c.hidden_stride = -16; }},
      {"logits: expected BF16 or F32, got F16", [](auto& c) { c.logits_dtype = DType::kF16; }},
      {"hidden: expected a pointer, got null", [](auto& c) { c.hidden = nullptr; }},
      {"weight: expected a pointer, got null", [](auto& c) { c.weight = nullptr; }},
      {"logits: expected a pointer, got null", [](auto& c) { c.logits = nullptr; }},
      {"hidden: expected an address that is a multiple of 16",
       [](auto& c) { c.hidden = static_cast<const uint16_t*>(c.hidden) + 4; }},
      {"weight: expected an address that is a multiple of 16",
       [](auto& c) { c.weight = static_cast<const uint16_t*>(c.weight) + 4; }},
      {"logits: expected memory of its own, got memory that overlaps hidden",
       [](auto& c) { c.logits = const_cast<void*>(c.hidden); }},
      {"logits: expected memory of its own, got memory that overlaps weight",
       [](auto& c) { c.logits = const_cast<void*>(c.weight); }},
  };
  for (const auto& [expected, mistake] : mistakes) {
    RouterGemm bad = p.call;
    mistake(bad);
    const Status on_host = router::router_gemm(bad);
    EXPECT_THAT(on_host, test::Refused(Code::kInvalidArgument, expected));
    EXPECT_EQ(device_router_gemm(1, bad, nullptr, &kNotingGemm).message(), on_host.message());
  }
  EXPECT_EQ(noted_gemm.calls, 0);
  EXPECT_THAT(p.f32, testing::Each(-7.0f));
}

TEST(RouterGemmFront, ADeviceGetsTheCallInItsStream) {
  noted_gemm = {};
  Problem p(3, 4, 16);
  int queue = 0;
  ASSERT_TRUE(device_router_gemm(2, p.call, &queue, &kNotingGemm).ok());
  EXPECT_EQ(noted_gemm.device, 2);
  EXPECT_EQ(noted_gemm.stream, &queue);
  EXPECT_EQ(noted_gemm.call.weight, p.call.weight);
  p.call.tokens = 0;
  p.call.hidden = p.call.weight = p.call.logits = nullptr;
  ASSERT_TRUE(device_router_gemm(2, p.call, &queue, &kNotingGemm).ok());
  EXPECT_EQ(noted_gemm.calls, 1) << "no tokens, no launch";
  EXPECT_EQ(device_router_gemm(-1, p.call, nullptr, &kNotingGemm).code(), Code::kInvalidArgument);
}

// Through the C++ header, with rows apart and with rows that follow each other, in both types.
TEST(CApiRouterGemm, GivesWhatTheLibraryGivesAndRefusesWhatItRefuses) {
  auto call = nvfp4_moe::make<nvfp4_moe_router_gemm_call>();
  for (const int64_t padding : {8, 0}) {
    Problem p(3, 4, 16, padding);
    ASSERT_TRUE(router::router_gemm(p.call).ok());
    const std::vector<float> expected = p.f32;
    call.tokens = 3;
    call.num_experts = 4;
    call.hidden_size = 16;
    call.hidden = p.hidden.data();
    call.hidden_stride = padding == 0 ? 0 : 24;
    call.weight = p.weight.data();
    call.logits = p.bf16.data();
    call.logits_dtype = NVFP4_MOE_DTYPE_DEFAULT;
    nvfp4_moe::router_gemm(call);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(p.bf16[i], bf16_from_float(expected[i]));
    std::fill(p.f32.begin(), p.f32.end(), 0.0f);
    call.logits = p.f32.data();
    call.logits_dtype = NVFP4_MOE_DTYPE_F32;
    nvfp4_moe::router_gemm(call);
    EXPECT_EQ(p.f32, expected);
  }
  const struct {
    const char* expected;
    std::function<void(nvfp4_moe_router_gemm_call&)> mistake;
  } mistakes[] = {{"call.struct_size", [](auto& c) { c.struct_size = 1; }},
                  {"logits_dtype", [](auto& c) { c.logits_dtype = 77; }},
                  {"hidden_size: expected a multiple of 8", [](auto& c) { c.hidden_size = 9; }}};
  for (const auto& [text, mistake] : mistakes) {
    nvfp4_moe_router_gemm_call bad = call;
    mistake(bad);
    EXPECT_EQ(nvfp4_moe_router_gemm(&bad), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(text));
    EXPECT_EQ(nvfp4_moe_device_router_gemm("cuda:0", &bad, nullptr),
              NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  }
  EXPECT_EQ(nvfp4_moe_router_gemm(nullptr), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace nvfp4_moe::internal::router
