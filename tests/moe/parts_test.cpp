// The parts that a layer is summed from: expert ranges, slices of the intermediate dimension, the shared expert.
#include "moe/tiny.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

std::unique_ptr<MoeLayer> open(const TinyLayer& tiny, const Backend& backend, const LayerOptions& options) {
  auto layer = MoeLayer::open_on(backend, tiny.config(), tiny.source(), options);
  EXPECT_OK(layer);
  return std::move(*layer);
}

// One rank per expert, so that each rank's fp32 output is the sum of that expert's terms. Adding n terms in another
// order, each addition rounded (2^-24 of its result, and every partial sum lies below sum |term|), moves a sum by at
// most 2 n 2^-24 sum |term|; fma spares a rounding of each product, another n 2^-24.
TEST(ExpertRange, RanksAddUpToTheWhole) {
  MoeOptions options = tiny_options();
  options.top_k = 3;
  const TinyLayer tiny(options);
  for (const Backend* backend : test::runnable_backends()) {
    TinyBatch batch(options, 16);
    const std::vector<float> whole = run_tiny(*open(tiny, *backend, tiny_layer_options()), batch);
    std::vector<double> sum(whole.size()), sum_abs(whole.size());
    for (int64_t rank = 0; rank < 4; ++rank) {
      LayerOptions local = tiny_layer_options();
      local.range = {rank, 1};
      const std::vector<float> part = run_tiny(*open(tiny, *backend, local), batch);
      for (size_t i = 0; i < part.size(); ++i) {
        sum[i] += part[i];
        sum_abs[i] += std::abs(part[i]);
      }
    }
    for (size_t i = 0; i < whole.size(); ++i)
      ASSERT_LE(std::abs(whole[i] - sum[i]), 3 * 3 * 0x1p-24 * sum_abs[i]) << backend->name << " " << i;
  }
}

TEST(ExpertRange, OtherRanksChoicesAddNothing) {
  const TinyLayer tiny;
  for (const Backend* backend : test::runnable_backends()) {
    LayerOptions local = tiny_layer_options();
    local.range = {2, 2};
    const auto layer = open(tiny, *backend, local);
    TinyBatch batch(tiny.options, 8);
    const std::vector<float> out = run_tiny(*layer, batch);
    TinyBatch masked(tiny.options, 8);
    for (auto& id : masked.ids) id = id < 2 ? -1 : id;
    EXPECT_TRUE(same_bits(run_tiny(*layer, masked), out)) << backend->name;
  }
}

TEST(SharedExpert, IsAddedWithItsFactors) {
  MoeOptions with = tiny_options();
  with.shared_intermediate_size = 32;
  const TinyLayer tiny(with);
  TinyLayer routed_only(with);
  routed_only.options.shared_intermediate_size = 0;
  routed_only.shared.clear();
  for (const Backend* backend : test::runnable_backends()) {
    const auto layer = open(tiny, *backend, tiny_layer_options());
    const auto plain = open(routed_only, *backend, tiny_layer_options());
    TinyBatch batch(with, 8);
    const auto run_with = [&](float factor) {
      const std::vector<float> factors(8, factor);
      const Buffer workspace = workspace_of(*layer);
      Batch call = batch.batch();
      call.shared_weights = factors.data();
      EXPECT_OK(layer->run(call, workspace.data(), workspace.size_bytes()));
      return batch.out;
    };
    const std::vector<float> expected = run_tiny(*plain, batch);
    EXPECT_TRUE(same_bits(run_with(0.0f), expected)) << backend->name;
    const std::vector<float> one = run_with(1.0f);
    EXPECT_FALSE(same_bits(one, expected));
    EXPECT_TRUE(same_bits(run_tiny(*layer, batch), one));  // null factors are ones
  }
}

TEST(SharedExpert, MustBeGivenWhereTheConfigHasOne) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const TinyLayer tiny(options);
  LayerSource source = tiny.source();
  source.shared_expert = nullptr;
  EXPECT_EQ(MoeLayer::open(tiny.config(), source, tiny_layer_options()).status().code(), Code::kInvalidArgument);
}

TEST(SharedExpert, AloneWhereAllIdsAreMinusOne) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 48;
  TinyLayer tiny(options);
  tiny.shared[0] = tiny.experts[1];
  const auto layer = open(tiny, kReferenceBackend, tiny_layer_options());
  TinyBatch batch(options, 4);
  batch.ids.assign(batch.ids.size(), -1);
  const std::vector<float> alone = run_tiny(*layer, batch);

  TinyLayer routed(options);
  routed.options.shared_intermediate_size = 0;
  routed.shared.clear();
  for (size_t i = 0; i < batch.ids.size(); ++i) {  // the same expert through the routed path, with weight 1
    batch.ids[i] = i % 2 == 0 ? 1 : -1;
    batch.weights[i] = 1.0f;
  }
  EXPECT_TRUE(same_bits(run_tiny(*open(routed, kReferenceBackend, tiny_layer_options()), batch), alone));
}

// Two slices of the intermediate dimension under bf16 activations: every intermediate value is the same as in the whole
// layer, so the parts differ from it by gemm2's split alone. row_format fp32 leaves roundings of 2^-24 of sum |p|, each
// of the two sums and the reference's own; sum |p| is bounded by Cauchy-Schwarz per output channel, here measured
// coarsely by the largest output of a layer with all-positive terms: 64 * 2^-24 of the largest |out| covers it many
// times over.
TEST(IntermediateSlice, SlicesAddUpToTheWhole) {
  MoeOptions options = tiny_options();
  options.intermediate_size = 64;
  options.activation_format = ActivationFormat::kBf16;
  options.row_format = RowFormat::kFp32;
  options.top_k = 1;
  TinyLayer whole(options);
  for (auto& expert : whole.experts)  // positive weights: no cancellation, so |out| is sum |p|
    for (auto* matrix : {&expert.gate, &expert.up, &expert.down})
      for (auto& byte : matrix->codes) byte &= 0x77;
  TinyBatch batch(options, 6);
  for (auto& value : batch.hidden) value &= 0x7FFF;
  for (const Backend* backend : test::runnable_backends()) {
    const std::vector<float> expected = run_tiny(*open(whole, *backend, tiny_layer_options()), batch);
    std::vector<float> sum(expected.size());
    for (const int64_t first : {0, 32}) {
      TinyLayer part(options);
      part.options.intermediate_size = 32;
      LayerSource source = whole.source();
      source.expert = [&whole, first](int64_t e) -> Result<LoadedExpert> {
        LoadedExpert loaded;
        ExpertSource all = whole.experts[static_cast<size_t>(e)].source();
        for (Nvfp4View* view : {&all.gate, &all.up}) {
          view->codes += first * view->codes_stride;
          view->block_scales += first * view->scales_stride;
          view->rows = 32;
        }
        all.down.codes += first / 2;
        all.down.block_scales += first / 16;
        all.down.cols = 32;
        loaded.source = all;
        return loaded;
      };
      auto layer = MoeLayer::open_on(*backend, part.config(), source, tiny_layer_options());
      ASSERT_OK(layer);
      const std::vector<float> out = run_tiny(**layer, batch);
      for (size_t i = 0; i < out.size(); ++i) sum[i] += out[i];
    }
    for (size_t i = 0; i < sum.size(); ++i)
      ASSERT_LE(std::abs(sum[i] - expected[i]), 64 * 0x1p-24 * std::abs(expected[i])) << backend->name << " " << i;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
