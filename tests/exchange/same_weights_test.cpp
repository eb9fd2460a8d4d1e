// Ranks that opened different weights, layers or row orders are refused.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exchange/parallel_case.h"
#include "moe/registry.h"
#include "parallel/open.h"
#include "support/checkpoint_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

class SameWeights : public testing::Test {
 protected:
  Checkpoint built(const std::string& name, const BuilderOptions& options,
                   const std::function<void(CheckpointBuilder&)>& change = {}) {
    CheckpointBuilder builder(options);
    if (change) change(builder);
    EXPECT_OK(builder.write(folder_.file(name)));
    return std::move(*must(Checkpoint::open(folder_.file(name))));
  }
  // Rank 0 opens a layer of `first`, rank 1 one of `other`. body gets what they opened.
  static void on_both(const Checkpoint& first, const Checkpoint& other, int64_t other_layer,
                      const std::function<void(const Result<std::unique_ptr<MoeLayer>>&)>& body) {
    on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
      LayerOptions options;
      options.limits.max_tokens = 4;
      options.executor = &serial_executor();
      const bool one = exchange.rank() == 0;
      body(open_layer(one ? first : other, one ? 1 : other_layer, {}, {}, options, {},
                      internal::Parallel{borrowed(exchange), {}}));
      EXPECT_OK(exchange.barrier());
    });
  }
  static void expect_refused(const Checkpoint& first, const Checkpoint& other) {
    const std::string text = "config of rank 1: expected hash of weights " + *weights_id(first, 1) +
                             " as on rank 0, got " + *weights_id(other, 1);
    on_both(first, other, 1, [&](const auto& layer) { EXPECT_EQ(layer.status().message(), text); });
  }

  TempDir folder_;
};

TEST_F(SameWeights, OtherWeightsAreRefusedWithBothHashes) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kModelOptStacked}) {
    const std::string name = to_string(format);
    BuilderOptions options{.model_type = "qwen3_moe", .format = format};
    const Checkpoint one = built(name, options), copy = built(name + " copy", options);
    on_both(one, copy, 1, [](const auto& layer) { EXPECT_OK(layer); });
    if (format == SourceFormat::kModelOpt) {
      // Only the last expert differs, and rank 0 reads nothing of it.
      const Checkpoint changed = built("changed", options, [](CheckpointBuilder& builder) {
        builder.matrix(1, 7, "up").tensor_scale *= 2;
        builder.matrix(1, 7, "gate").tensor_scale *= 2;
      });
      EXPECT_EQ(*weights_id(one, 0), *weights_id(changed, 0));
      expect_refused(one, changed);
    } else {
      expect_refused(one, *must(Checkpoint::open(folder_.file(name),
                                                 {.gate_up_order = GateUpOrder::kUpFirst})));
    }
    options.seed = 2;
    expect_refused(one, built(name + " other", options));
  }
}

TEST_F(SameWeights, OtherLayersAreRefusedAndNoSourceToRearrangeFrom) {
  const Checkpoint one = built("one", {.model_type = "qwen3_moe"}),
                   other = built("other", {.model_type = "qwen3_moe", .seed = 2});
  on_both(one, one, 0, [](const auto& layer) {
    EXPECT_EQ(layer.status().message(),
              "config of rank 1: expected weights of layer 1 as on rank 0, got layer 0");
  });
  on_both(one, one, 1, [&](const auto& layer) {
    ASSERT_OK(layer);
    const std::vector<int64_t> backwards{7, 6, 5, 4, 3, 2, 1, 0};
    RankCombine& ranks = ranks_of(**layer);
    EXPECT_THAT(ranks.rearrange_checkpoint(backwards, other, 1).message(),
                HasSubstr("rank 0: weights: expected those that the layer was opened with"));
    EXPECT_THAT(ranks.rearrange_checkpoint(backwards, one, 0).message(),
                HasSubstr("got those of layer 0"));
    EXPECT_OK(ranks.rearrange_checkpoint(backwards, one, 1));
  });
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
