// Ranks that opened different weights, layers, backends or libraries are refused.

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

Checkpoint built(const TempDir& folder, const std::string& name, const BuilderOptions& options,
                 const std::function<void(CheckpointBuilder&)>& change = {}) {
  const std::string path = (folder.path() / name).string();
  CheckpointBuilder builder(options);
  if (change) change(builder);
  EXPECT_OK(builder.write(path));
  auto checkpoint = Checkpoint::open(path);
  EXPECT_OK(checkpoint);
  return std::move(*checkpoint);
}

// Each rank's failure to open `layer(rank)` of its checkpoint.
std::vector<std::string> opened(const std::vector<const Checkpoint*>& checkpoints,
                                const std::vector<int64_t>& layers) {
  std::vector<std::string> messages(checkpoints.size());
  on_ranks(Over::kThreads, static_cast<int>(checkpoints.size()), kCaseTimeout,
           [&](Exchange& exchange) {
             const auto rank = static_cast<size_t>(exchange.rank());
             LayerOptions options;
             options.limits.max_tokens = 4;
             options.executor = &serial_executor();
             const auto layer = open_checkpoint_over_ranks(*checkpoints[rank], layers[rank], {},
                                                           options, {}, borrowed(exchange));
             messages[rank] = layer.status().message();
             EXPECT_OK(exchange.barrier());
           });
  return messages;
}

std::string differ(const std::string& what, const Checkpoint& first, int64_t first_layer,
                   const Checkpoint& other, int64_t other_layer) {
  return "config of rank 1: expected " + what + *weights_id(first, first_layer) +
         " as on rank 0, got " + *weights_id(other, other_layer);
}

TEST(SameWeights, AnotherCheckpointIsRefusedWithBothHashes) {
  for (const bool stacked : {false, true}) {
    const TempDir folder;
    BuilderOptions options{
        .model_type = "qwen3_moe",
        .format = stacked ? SourceFormat::kModelOptStacked : SourceFormat::kModelOpt};
    const Checkpoint one = built(folder, "one", options), copy = built(folder, "copy", options);
    options.seed = 2;
    const Checkpoint other = built(folder, "other", options);
    EXPECT_THAT(opened({&one, &copy}, {1, 1}), Each(""));
    EXPECT_THAT(opened({&one, &other}, {1, 1}), Each(differ("hash of weights ", one, 1, other, 1)));
  }
}

TEST(SameWeights, TheSameStackReadInAnotherOrderIsRefused) {
  const TempDir folder;
  const Checkpoint one =
      built(folder, "one", {.model_type = "qwen3_moe", .format = SourceFormat::kModelOptStacked});
  const auto up_first = must(
      Checkpoint::open((folder.path() / "one").string(), {.gate_up_order = GateUpOrder::kUpFirst}));
  EXPECT_THAT(opened({&one, &*up_first}, {1, 1}),
              Each(differ("hash of weights ", one, 1, *up_first, 1)));
}

// Only the last expert differs, and rank 0 reads nothing of it.
TEST(SameWeights, OneExpertThatDiffersIsSeen) {
  const TempDir folder;
  const BuilderOptions options{.model_type = "qwen3_moe"};
  const Checkpoint one = built(folder, "one", options);
  const Checkpoint other = built(folder, "other", options, [](CheckpointBuilder& builder) {
    builder.matrix(1, 7, "up").tensor_scale *= 2;
    builder.matrix(1, 7, "gate").tensor_scale *= 2;
  });
  EXPECT_EQ(*weights_id(one, 0), *weights_id(other, 0));
  EXPECT_THAT(opened({&one, &other}, {1, 1}), Each(differ("hash of weights ", one, 1, other, 1)));
}

TEST(SameWeights, AnotherLayerIsRefused) {
  const TempDir folder;
  const Checkpoint checkpoint = built(folder, "model", {.model_type = "qwen3_moe"});
  EXPECT_THAT(opened({&checkpoint, &checkpoint}, {0, 1}),
              Each("config of rank 1: expected weights of layer 0 as on rank 0, got layer 1"));
}

TEST(SameWeights, AnotherCheckpointIsNoSourceToRearrangeFrom) {
  const TempDir folder;
  const Checkpoint one = built(folder, "one", {.model_type = "qwen3_moe"}),
                   other = built(folder, "other", {.model_type = "qwen3_moe", .seed = 2});
  on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
    LayerOptions options;
    options.limits.max_tokens = 4;
    options.executor = &serial_executor();
    const auto layer =
        must(open_checkpoint_over_ranks(one, 1, {}, options, {}, borrowed(exchange)));
    const std::vector<int64_t> backwards{7, 6, 5, 4, 3, 2, 1, 0};
    EXPECT_THAT(
        ranks_of(**layer).rearrange_checkpoint(backwards, other, 1).message(),
        HasSubstr("rank 0: weights: expected those that the layer was opened with, of hash"));
    EXPECT_THAT(ranks_of(**layer).rearrange_checkpoint(backwards, one, 0).message(),
                HasSubstr("got those of layer 0"));
    EXPECT_OK(ranks_of(**layer).rearrange_checkpoint(backwards, one, 1));
    EXPECT_OK(exchange.barrier());
  });
}

TEST(SameBackend, AnotherBackendIsRefused) {
  Case spec = sized_case(8, 2, 64, 48, 4);
  const auto data = must(make_case(spec));
  std::vector<std::string> messages(2);
  on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
    const auto rank = static_cast<size_t>(exchange.rank());
    LayerOptions options = options_of(*data);
    options.backend = rank == 0 ? "reference" : "cpu";
    const LayerSource source = source_of(*data);
    messages[rank] =
        open_over_ranks(data->config, source, options, {}, borrowed(exchange)).status().message();
    EXPECT_OK(exchange.barrier());
  });
  EXPECT_THAT(messages, Each("config of rank 1: expected backend reference as on rank 0, got cpu"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
