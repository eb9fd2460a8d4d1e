// The committed checkpoints that nvidia-modelopt and compressed-tensors exported
// (tests/vectors/make_checkpoint_vectors.py): opened, validated and loaded without Python. Both
// quantize the same weights, so their decoded values are close.

#include <cmath>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/dequantize.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

Result<Checkpoint> open(const std::string& producer) {
  return Checkpoint::open(NVFP4_MOE_SOURCE_DIR "/tests/vectors/" + producer + "_qwen3_moe");
}

std::vector<float> decode(const Nvfp4View& view) {
  std::vector<float> out(static_cast<size_t>(view.rows * view.cols));
  EXPECT_OK(dequantize(view, DType::kF32, out.data()));
  return out;
}

class Producers : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Exported, Producers, testing::Values("modelopt", "compressed_tensors"),
                         [](const auto& name) { return std::string(name.param); });

TEST_P(Producers, LoadsWithoutWarningsOrErrors) {
  auto checkpoint = must(open(GetParam()));
  const ModelInfo& model = checkpoint->model();
  EXPECT_EQ(model.format == SourceFormat::kModelOpt, std::string(GetParam()) == "modelopt");
  EXPECT_EQ(model.layers, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(model.options.num_experts, 4);
  EXPECT_EQ(model.options.top_k, 2);
  EXPECT_EQ(model.options.hidden_size, 64);
  EXPECT_EQ(model.options.intermediate_size, 48);
  for (const Finding& finding : checkpoint->findings())
    EXPECT_EQ(finding.severity, Severity::kNote) << finding.id;
  for (const int64_t layer : model.layers) {
    auto findings = must(checkpoint->validate(layer, {0, 4}));
    for (const Finding& finding : *findings)
      EXPECT_EQ(finding.severity, Severity::kNote) << to_string(finding);
    auto scales = must(checkpoint->layer_scales(layer));
    EXPECT_GT(scales->hidden.value_or(0), 0);
    EXPECT_GT(scales->intermediate.value_or(0), 0);
  }
}

TEST(ProducersTogether, DecodeTheSameWeightsTwice) {
  auto modelopt = must(open("modelopt"));
  auto compressed_tensors = must(open("compressed_tensors"));
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (int64_t expert = 0; expert < 4; ++expert) {
      auto a = must(modelopt->expert(layer, expert));
      auto b = must(compressed_tensors->expert(layer, expert));
      for (const auto& part : {&ExpertSource::gate, &ExpertSource::up, &ExpertSource::down}) {
        const std::vector<float> left = decode(a->source.*part);
        const std::vector<float> right = decode(b->source.*part);
        ASSERT_EQ(left.size(), right.size());
        double dot = 0;
        double left_sq = 0;
        double right_sq = 0;
        for (size_t i = 0; i < left.size(); ++i) {
          dot += double{left[i]} * right[i];
          left_sq += double{left[i]} * left[i];
          right_sq += double{right[i]} * right[i];
        }
        // Each is within 9.5 % of the original (numerics: an NMSE of 9.02e-3), so their cosine is
        // at least cos(2 asin(0.095)). Unrelated weights (another expert or projection) give about
        // 0.
        EXPECT_GT(dot / std::sqrt(left_sq * right_sq), std::cos(2 * std::asin(0.095)))
            << layer << " " << expert;
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
