// A layer's run that selects its experts by router logits, through C: it has the bits of a
// selection followed by a run on it, it performs the checks of both, and it writes nothing if they
// fail.
#include <functional>
#include <string>
#include <vector>

#include "moe/c_layer.h"

namespace nvfp4_moe::internal {
namespace {

using testing::HasSubstr;

class RunLogits : public testing::Test {
 public:
  RunLogits() {
    router.num_experts = c.tiny.options.num_experts;
    router.top_k = c.tiny.options.top_k;
    router.renormalize = 1;
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7 % 11) / 4.0f;
    routing.tokens = kTokens;
    routing.logits = logits.data();
    routing.logits_dtype = NVFP4_MOE_DTYPE_F32;
    routing.topk_ids = ids.data();
    routing.topk_weights = weights.data();
    batch.topk_ids = nullptr;
    batch.topk_weights = nullptr;
  }
  nvfp4_moe_status run() {
    return nvfp4_moe_layer_run_logits(layer.get(), &router, &routing, &batch, workspace.data(),
                                      workspace.size_bytes(), nullptr);
  }

  static constexpr int64_t kTokens = 5;
  test::CLayer c;
  test::TinyBatch tiny = test::TinyBatch(c.tiny.options, kTokens);
  nvfp4_moe::Layer layer = c.open();
  nvfp4_moe::Workspace workspace = nvfp4_moe::Workspace(layer.workspace_bytes(kTokens));
  nvfp4_moe_router_config router = nvfp4_moe::make<nvfp4_moe_router_config>();
  nvfp4_moe_router_batch routing = nvfp4_moe::make<nvfp4_moe_router_batch>();
  nvfp4_moe_batch batch = test::c_batch(tiny);
  std::vector<float> logits =
      std::vector<float>(static_cast<size_t>(kTokens * c.tiny.options.num_experts));
  std::vector<int32_t> ids =
      std::vector<int32_t>(static_cast<size_t>(kTokens * c.tiny.options.top_k), -7);
  std::vector<float> weights = std::vector<float>(ids.size(), -7.0f);
};

TEST_F(RunLogits, IsASelectionAndARun) {
  ASSERT_EQ(run(), NVFP4_MOE_STATUS_OK) << nvfp4_moe_last_error();
  const std::vector<float> selected = tiny.out;
  // It takes the arrays that it writes, too.
  batch.topk_ids = ids.data();
  batch.topk_weights = weights.data();
  layer.run_logits(router, routing, batch, workspace);
  EXPECT_EQ(tiny.out, selected);

  std::vector<int32_t> chosen(ids.size());
  std::vector<float> chosen_weights(weights.size());
  routing.topk_ids = chosen.data();
  routing.topk_weights = chosen_weights.data();
  ASSERT_EQ(nvfp4_moe_select_experts(&router, &routing), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(ids, chosen);
  EXPECT_EQ(weights, chosen_weights);
  batch.topk_ids = chosen.data();
  batch.topk_weights = chosen_weights.data();
  batch.ids_dtype = NVFP4_MOE_DTYPE_I32;
  std::fill(tiny.out.begin(), tiny.out.end(), -7.0f);
  layer.run(batch, workspace);
  EXPECT_EQ(tiny.out, selected);
}

TEST_F(RunLogits, RefusesBeforeItWrites) {
  const struct {
    const char* expected;
    std::function<void(RunLogits&)> mistake;
  } mistakes[] = {
      {"router num_experts: expected the layer's", [](auto& t) { t.router.num_experts *= 2; }},
      {"router top_k: expected the layer's", [](auto& t) { t.router.top_k = 1; }},
      {"router tokens: expected the batch's 5, got 4", [](auto& t) { t.routing.tokens = 4; }},
      {"expected NULL or routing's arrays", [](auto& t) { t.batch.topk_ids = t.logits.data(); }},
      {"expected NULL or routing's arrays",
       [](auto& t) { t.batch.topk_weights = t.logits.data(); }},
      {"logits: expected a pointer, got null", [](auto& t) { t.routing.logits = nullptr; }},
      {"correction_bias: expected a pointer", [](auto& t) { t.router.correction_bias = 1; }},
      {"expected memory of its own", [](auto& t) { t.batch.out = t.logits.data(); }},
      {"expected memory of its own",
       [](auto& t) { t.routing.topk_weights = static_cast<float*>(t.batch.out); }},
      {"expected memory of its own",
       [](auto& t) { t.routing.topk_ids = const_cast<void*>(t.batch.hidden); }},
      {"expected memory of its own", [](auto& t) { t.routing.logits = t.workspace.data(); }},
      {"tokens: expected 0 to 16, got 17", [](auto& t) { t.batch.tokens = t.routing.tokens = 17; }},
  };
  const auto router_before = router;
  const auto routing_before = routing;
  const auto batch_before = batch;
  for (const auto& [expected, mistake] : mistakes) {
    router = router_before, routing = routing_before, batch = batch_before;
    mistake(*this);
    EXPECT_EQ(run(), NVFP4_MOE_STATUS_INVALID_ARGUMENT) << expected;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(expected));
    EXPECT_EQ(ids, std::vector<int32_t>(ids.size(), -7)) << expected;
  }
  router = router_before, routing = routing_before, batch = batch_before;
  batch.tokens = routing.tokens = 0;
  EXPECT_EQ(run(), NVFP4_MOE_STATUS_OK) << nvfp4_moe_last_error();
  EXPECT_EQ(ids[0], -7);
}

}  // namespace
}  // namespace nvfp4_moe::internal
