// The argument checks of expert selection, shared by the host and a device, and the C interface
// over it. A table that only records its calls replaces a device and shows which calls would reach
// one.
#include "moe/router.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "nvfp4_moe/nvfp4_moe.hpp"
#include "support/support.h"

namespace nvfp4_moe::internal::router {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kTokens = 3, kExperts = 8, kTopK = 2, kVocab = 5;

struct NotedSelection {
  int calls = 0;
  int device = -1;
  void* stream = nullptr;
  SelectExperts call;
};
NotedSelection noted_selection;
constexpr DeviceRouter kNotingRouter = {
    .router_gemm = nullptr,
    .select_experts = [](int device, const SelectExperts& call, void* stream) -> Status {
      ++noted_selection.calls;
      noted_selection.device = device;
      noted_selection.stream = stream;
      noted_selection.call = call;
      return {};
    }};

class RouterFront : public testing::Test {
 protected:
  RouterFront() {
    noted_selection = {};
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 5 % 8);
    call.config.num_experts = kExperts;
    call.config.top_k = kTopK;
    call.config.renormalize = true;
    call.tokens = kTokens;
    call.logits = logits.data();
    call.logits_dtype = DType::kF32;
    call.logits_stride = kExperts;
    call.topk_ids = ids.data();
    call.topk_weights = weights.data();
  }
  void use_hash() {
    call.config.scoring = Scoring::kSigmoid;
    call.config.hash_routing = true;
    call.token_ids = token_ids.data();
    call.hash_table = table.data();
    call.vocab_size = kVocab;
  }

  std::vector<float> logits = std::vector<float>(kTokens * kExperts);
  std::vector<float> bias = std::vector<float>(kExperts);
  std::vector<int64_t> token_ids = std::vector<int64_t>(kTokens);
  std::vector<int64_t> table = std::vector<int64_t>(kVocab * kTopK);
  std::vector<int32_t> ids = std::vector<int32_t>(kTokens * kTopK, -7);
  std::vector<float> weights = std::vector<float>(kTokens * kTopK, -7.0f);
  uint64_t bad_ids = 0;
  SelectExperts call;
};

// Each mistake has the same message on the host and on a device. Nothing is enqueued on the device,
// and nothing is written.
TEST_F(RouterFront, OneMistakeOneText) {
  const struct {
    const char* expected;
    std::function<void(SelectExperts&)> mistake;
  } mistakes[] = {
      {"num_experts: expected 1..1024, got 0", [](auto& c) { c.config.num_experts = 0; }},
      {"top_k: expected at most the 8 experts, got 9", [](auto& c) { c.config.top_k = 9; }},
      {"scoring: expected one of softmax, sigmoid, sqrt_softplus, got 7",
       [](auto& c) { c.config.scoring = static_cast<Scoring>(7); }},
      {"top_k: expected 1..32, got 0", [](auto& c) { c.config.top_k = 0; }},
      {"num_expert_group: expected a divisor", [](auto& c) { c.config.num_expert_group = 3; }},
      {"topk_group: expected groups that hold top_k 2",
       [](auto& c) { c.config.num_expert_group = 8, c.config.topk_group = 1; }},
      {"topk_group: expected 1..2, got 3",
       [](auto& c) { c.config.num_expert_group = 2, c.config.topk_group = 3; }},
      {"tokens: expected 0 to 1073741824, got -1", [](auto& c) { c.tokens = -1; }},
      {"tokens: expected 0 to 1073741824",
       [](auto& c) { c.tokens = std::numeric_limits<int64_t>::max(); }},
      {"logits_stride: expected 0 to 1073741824, got -8", [](auto& c) { c.logits_stride = -8; }},
      {"logits: expected a pointer, got null", [](auto& c) { c.logits = nullptr; }},
      {"logits: expected an address that is a multiple of 4",
       [](auto& c) { c.logits = static_cast<const char*>(c.logits) + 2; }},
      {"logits", [](auto& c) { c.logits_dtype = DType::kF64; }},
      {"topk_ids: expected I32 or I64, got U8", [](auto& c) { c.ids_dtype = DType::kU8; }},
      {"topk_ids: expected a pointer, got null", [](auto& c) { c.topk_ids = nullptr; }},
      {"topk_weights: expected a pointer, got null", [](auto& c) { c.topk_weights = nullptr; }},
      {"topk_ids: expected memory of its own", [](auto& c) { c.topk_ids = c.topk_weights; }},
      {"topk_weights: expected memory of its own, got memory that overlaps logits",
       [](auto& c) { c.topk_weights = static_cast<float*>(const_cast<void*>(c.logits)) + 20; }},
      {"bad_ids: expected an address that is a multiple of 8",
       [this](auto& c) {
         c.bad_ids = reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(&bad_ids) + 4);
       }},
      {"correction_bias: expected null without config.correction_bias",
       [this](auto& c) { c.correction_bias = bias.data(); }},
      {"correction_bias: expected a pointer with config.correction_bias, got null",
       [](auto& c) { c.config.correction_bias = true; }},
      {"expert_scale: expected null without config.expert_scale",
       [this](auto& c) { c.expert_scale = bias.data(); }},
      {"expert_scale: expected a pointer with config.expert_scale, got null",
       [](auto& c) { c.config.expert_scale = true; }},
      {"topk_weights: expected memory of its own, got memory that overlaps expert_scale",
       [this](auto& c) { c.config.expert_scale = true, c.expert_scale = weights.data(); }},
      {"token_ids: expected null without config.hash_routing",
       [this](auto& c) { c.token_ids = token_ids.data(); }},
      {"hash_table: expected null without config.hash_routing",
       [this](auto& c) { c.hash_table = table.data(); }},
      {"token_ids: expected a pointer with config.hash_routing",
       [this](auto& c) { use_hash(), c = call, c.token_ids = nullptr; }},
      {"hash_table: expected a pointer with config.hash_routing",
       [this](auto& c) { use_hash(), c = call, c.hash_table = nullptr; }},
      {"vocab_size: expected 1 to", [this](auto& c) { use_hash(), c = call, c.vocab_size = 0; }},
      {"token_ids: expected I32 or I64, got F32",
       [this](auto& c) { use_hash(), c = call, c.token_ids_dtype = DType::kF32; }},
      {"hash_table: expected I32 or I64, got F32",
       [this](auto& c) { use_hash(), c = call, c.hash_table_dtype = DType::kF32; }},
  };
  const SelectExperts good = call;
  for (const auto& [expected, mistake] : mistakes) {
    SelectExperts bad = call = good;
    mistake(bad);
    const Status on_host = router::select_experts(bad);
    EXPECT_THAT(on_host, test::Refused(Code::kInvalidArgument, expected));
    EXPECT_EQ(router::device_select_experts(2, bad, nullptr, &kNotingRouter).message(),
              on_host.message());
  }
  EXPECT_EQ(noted_selection.calls, 0);
  EXPECT_THAT(ids, testing::Each(-7));
  EXPECT_THAT(weights, testing::Each(-7.0f));
}

TEST_F(RouterFront, ScalesOfExpertsAreMultipliedOnceAndPassedToADevice) {
  ASSERT_TRUE(router::select_experts(call).ok());
  const std::vector<float> plain = weights;
  const std::vector<int32_t> chosen = ids;
  const std::vector<float> scale = {0.75f, 1.5f, 0.0f, -2.0f, 1.0f, 0.1f, 3.0f, NAN};
  call.config.expert_scale = true;
  call.expert_scale = scale.data();
  ASSERT_TRUE(router::select_experts(call).ok());
  EXPECT_EQ(ids, chosen);
  for (size_t i = 0; i < ids.size(); ++i) {
    const float expected = plain[i] * scale[static_cast<size_t>(ids[i])];
    if (std::isnan(expected))
      EXPECT_TRUE(std::isnan(weights[i]));
    else
      EXPECT_NEAR(weights[i], expected, 0x1p-22f * std::fabs(expected));
  }
  ASSERT_TRUE(router::device_select_experts(2, call, nullptr, &kNotingRouter).ok());
  EXPECT_EQ(noted_selection.call.expert_scale, scale.data());
}

TEST_F(RouterFront, ADeviceGetsTheCallInItsStream) {
  int queue = 0;
  ASSERT_TRUE(router::device_select_experts(2, call, &queue, &kNotingRouter).ok());
  EXPECT_EQ(noted_selection.calls, 1);
  EXPECT_EQ(noted_selection.device, 2);
  EXPECT_EQ(noted_selection.stream, &queue);
  EXPECT_EQ(noted_selection.call.config, call.config);
  EXPECT_EQ(noted_selection.call.topk_ids, ids.data());
  call.tokens = 0;
  ASSERT_TRUE(router::device_select_experts(2, call, &queue, &kNotingRouter).ok());
  EXPECT_EQ(noted_selection.calls, 1) << "no tokens, no launch";
  EXPECT_EQ(router::device_select_experts(-1, call, nullptr, &kNotingRouter).code(),
            Code::kInvalidArgument);
}

TEST_F(RouterFront, TiesGoToTheLowerIdAndNanGoesLast) {
  std::fill(logits.begin(), logits.end(), 1.0f);
  logits[kExperts + 0] = logits[kExperts + 1] = std::nanf("");
  logits[2 * kExperts + 7] = logits[2 * kExperts + 5] = 2.0f;
  ASSERT_TRUE(router::select_experts(call).ok());
  EXPECT_THAT(ids, ElementsAre(0, 1, 2, 3, 5, 7));
  EXPECT_EQ(weights[0], 0.5f);
  EXPECT_TRUE(std::isnan(weights[2]) && std::isnan(weights[3]));
  EXPECT_EQ(weights[4], 0.5f);
}

// ---- the C interface

struct CRouter {
  nvfp4_moe_router_config config = nvfp4_moe::make<nvfp4_moe_router_config>();
  nvfp4_moe_router_batch batch = nvfp4_moe::make<nvfp4_moe_router_batch>();
};

class CApiRouter : public RouterFront {
 protected:
  CApiRouter() {
    c.config.num_experts = kExperts;
    c.config.top_k = kTopK;
    c.config.renormalize = 1;
    c.batch.tokens = kTokens;
    c.batch.logits = logits.data();
    c.batch.logits_dtype = NVFP4_MOE_DTYPE_F32;
    c.batch.topk_ids = ids.data();
    c.batch.topk_weights = weights.data();
  }
  CRouter c;
};

TEST_F(CApiRouter, ReadsEveryField) {
  // Groups of two, two of which are kept: {2, 3} by its sum, then {6, 7}.
  logits.assign(kTokens * kExperts, -30.0f);
  for (const int expert : {2, 3, 6}) logits[static_cast<size_t>(expert)] = 0.0f;
  bias[4] = 0.25f;
  c.config.num_expert_group = 4;
  c.config.topk_group = 2;
  c.config.scoring = NVFP4_MOE_SCORING_SIGMOID;
  c.config.group_score = NVFP4_MOE_GROUP_SCORE_TOP2_SUM;
  c.config.renormalize_epsilon = 1.0f;
  c.config.routed_scaling_factor = 3.0f;
  c.config.correction_bias = 1;
  c.batch.correction_bias = bias.data();
  c.batch.tokens = 1;
  ASSERT_EQ(nvfp4_moe_select_experts(&c.config, &c.batch), NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  EXPECT_EQ(ids[0], 2);
  EXPECT_EQ(ids[1], 3);
  EXPECT_EQ(weights[0], 0.75f);  // 0.5 / (1 + 1) * 3
  bias[5] = 2.0f;                // now group {4, 5} is kept, and 5 comes first
  ASSERT_EQ(nvfp4_moe_select_experts(&c.config, &c.batch), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(ids[0], 5);

  c.config = nvfp4_moe::make<nvfp4_moe_router_config>();
  c.config.num_experts = kExperts;
  c.config.top_k = kTopK;
  c.config.scoring = NVFP4_MOE_SCORING_SIGMOID;
  c.config.hash_routing = 1;
  std::vector<int32_t> narrow_table = {1, 0, 7, 9}, tokens = {1};
  std::vector<int64_t> wide_ids(kTopK);
  c.batch.correction_bias = nullptr;
  c.batch.token_ids = tokens.data();
  c.batch.token_ids_dtype = NVFP4_MOE_DTYPE_I32;
  c.batch.hash_table = narrow_table.data();
  c.batch.hash_table_dtype = NVFP4_MOE_DTYPE_I32;
  c.batch.vocab_size = 2;
  c.batch.topk_ids = wide_ids.data();
  c.batch.ids_dtype = NVFP4_MOE_DTYPE_I64;
  c.batch.bad_ids = &bad_ids;
  ASSERT_EQ(nvfp4_moe_select_experts(&c.config, &c.batch), NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  EXPECT_THAT(wide_ids, ElementsAre(7, -1));
  EXPECT_EQ(weights[1], 0.0f);
  EXPECT_EQ(bad_ids, 1u);
}

TEST_F(CApiRouter, Refuses) {
  const struct {
    const char* expected;
    std::function<void(CRouter&)> mistake;
  } mistakes[] = {
      {"config.struct_size", [](auto& r) { r.config.struct_size = 1; }},
      {"batch.struct_size", [](auto& r) { r.batch.struct_size = 0; }},
      {"scoring: expected 0 to 2, got 3", [](auto& r) { r.config.scoring = 3; }},
      {"group_score: expected 0 to 1, got -1", [](auto& r) { r.config.group_score = -1; }},
      {"renormalize: expected 0 or 1, got 2", [](auto& r) { r.config.renormalize = 2; }},
      {"correction_bias: expected 0 or 1, got 2", [](auto& r) { r.config.correction_bias = 2; }},
      {"hash_routing: expected 0 or 1, got -1", [](auto& r) { r.config.hash_routing = -1; }},
      {"expert_scale: expected 0 or 1, got 5", [](auto& r) { r.config.expert_scale = 5; }},
      {"logits_dtype", [](auto& r) { r.batch.logits_dtype = 77; }},
      {"logits: expected a pointer, got null", [](auto& r) { r.batch.logits = nullptr; }},
  };
  for (const auto& [expected, mistake] : mistakes) {
    CRouter bad = c;
    mistake(bad);
    EXPECT_EQ(nvfp4_moe_select_experts(&bad.config, &bad.batch), NVFP4_MOE_STATUS_INVALID_ARGUMENT)
        << expected;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(expected));
    EXPECT_EQ(nvfp4_moe_device_select_experts("cuda:0", &bad.config, &bad.batch, nullptr),
              NVFP4_MOE_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(expected));
  }
  EXPECT_EQ(nvfp4_moe_select_experts(nullptr, &c.batch), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_select_experts(&c.config, nullptr), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_device_select_experts("cuda:-1", &c.config, &c.batch, nullptr),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(ids, testing::Each(-7));
}

}  // namespace
}  // namespace nvfp4_moe::internal::router
