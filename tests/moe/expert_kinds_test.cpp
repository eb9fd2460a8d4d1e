// Experts with biases, without a gate (relu2), and both, through every interface of a layer:
// replacements, runs from C++, C and a repro file are the same, and errors are refused. tests/steps
// and tests/layer test their arithmetic and that they unpack unchanged.
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "core/activation.h"
#include "moe/c_layer.h"
#include "moe/repro.h"
#include "support/backends.h"
#include "support/case_source.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

constexpr const char *kBiases = "w4a16_biases_oai/e8", *kRelu2 = "w4a4_relu2_shared_ep_i64/e8",
                     *kRelu2Biases = "w4a4_relu2_biases_shared/e8";

CaseData case_named(const char* name) { return make_case(cases_named(name).front()).value(); }

std::unique_ptr<MoeLayer> open_case(const CaseData& data, const char* backend = "cpu") {
  LayerOptions options = tiny_layer_options(data.spec.tokens);
  options.backend = backend;
  options.range = data.spec.range;
  return MoeLayer::open(data.config, source_of(data), options).value();
}
std::vector<uint8_t> run_case(const MoeLayer& layer, const CaseData& data) {
  std::vector<uint8_t> out(data.out_bytes());
  EXPECT_OK(run_in(workspace_of(layer), layer, data.batch(out.data())));
  return out;
}

class ExpertKinds : public testing::TestWithParam<const char*> {
 protected:
  CaseData data = case_named(GetParam());
};

TEST_P(ExpertKinds, AreReplacedInPlaceByWhatUnpacks) {
  CaseData other = data;
  std::swap(other.experts[0], other.experts[1]);
  std::swap(other.tensor_scales[0], other.tensor_scales[1]);
  const auto layer = open_case(data), others = open_case(other, "reference");
  const std::vector<uint8_t> expected = run_case(*open_case(other), data);
  EXPECT_NE(run_case(*layer, data), expected);
  const LayerSource unpacked = unpacked_source(*others);
  for (int64_t e = 0; e < data.spec.range.count; ++e)
    ASSERT_OK(layer->replace_expert(e, must(unpacked.expert(data.spec.range.global(e)))->source));
  EXPECT_EQ(run_case(*layer, data), expected);
}

TEST_P(ExpertKinds, TravelInAReproFile) {
  const auto layer = open_case(data, "reference");
  std::vector<uint8_t> out = run_case(*layer, data);
  TempDir directory;
  const std::string path = directory.file("repro.safetensors");
  ASSERT_OK(write_repro(path, *layer, data.batch(out.data()), true));
  const auto report = must(replay(path, "reference"));
  EXPECT_TRUE(report->passed());
  EXPECT_EQ(report->same_bits, true);
  EXPECT_TRUE(must(replay(path, "cpu"))->passed());
}

TEST_P(ExpertKinds, ThroughTheCInterface) {
  const CCase c(data);
  const nvfp4_moe::Layer layer = c.open();
  for (int64_t e = 0; e < data.spec.range.count; ++e) {
    const ExpertBuffers& expected = data.experts[static_cast<size_t>(e)];
    std::vector<uint8_t> up(expected.up.codes.size());
    std::vector<float> gate_bias(expected.gate_bias.size()), down_bias(expected.down_bias.size());
    auto unpacked = nvfp4_moe::make<nvfp4_moe_expert_out>();
    unpacked.up_codes = up.data();
    unpacked.gate_bias = gate_bias.data();
    unpacked.down_bias = down_bias.data();
    layer.unpack_expert(e, unpacked);
    EXPECT_EQ(up, expected.up.codes);
    EXPECT_EQ(gate_bias, expected.gate_bias);
    EXPECT_EQ(down_bias, expected.down_bias);
    if (expected.gate.codes.empty()) {
      EXPECT_EQ(unpacked.gate_tensor_scale, 1.0f);
    }
  }
  std::vector<uint8_t> out(data.out_bytes());
  const Batch b = data.batch(out.data());
  auto batch = nvfp4_moe::make<nvfp4_moe_batch>();
  batch.tokens = b.tokens;
  batch.hidden = b.hidden;
  batch.topk_ids = b.topk_ids;
  batch.ids_dtype = b.ids_dtype == DType::kI64 ? NVFP4_MOE_DTYPE_I64 : NVFP4_MOE_DTYPE_I32;
  batch.topk_weights = b.topk_weights;
  batch.shared_weights = b.shared_weights;
  batch.out = out.data();
  layer.run(batch, nvfp4_moe::Workspace(layer.workspace_bytes(b.tokens)));
  EXPECT_EQ(out, run_case(*open_case(data), data));
}

INSTANTIATE_TEST_SUITE_P(Names, ExpertKinds, testing::Values(kBiases, kRelu2, kRelu2Biases),
                         [](const auto& kind) {
                           const std::string name = kind.param;
                           return name.substr(0, name.find('/'));
                         });

TEST(ExpertKind, AWrongReplacementIsRefusedAndChangesNothing) {
  std::vector<float> bad(64);
  bad[3] = std::numeric_limits<float>::infinity();
  const struct {
    const char *kind, *words;
    std::function<void(ExpertSource&)> mistake;
  } mistakes[] = {
      {kBiases, "up bias: expected one (expert_biases), got none",
       [](auto& s) { s.biases.up = nullptr; }},
      {kBiases, "down bias: expected finite numbers, got inf at row 3",
       [&](auto& s) { s.biases.down = bad.data(); }},
      {kRelu2, "gate: expected none with activation relu2, got (48, 64)",
       [](auto& s) { s.gate = s.up; }},
      {kRelu2Biases, "gate bias: expected none", [](auto& s) { s.biases.gate = s.biases.up; }},
      {"w4a4/e8", "gate bias: expected none", [&](auto& s) { s.biases.gate = bad.data(); }},
      {"w4a4/e8", "gate: expected (48, 64), got (0, 0)", [](auto& s) { s.gate = {}; }},
  };
  for (const auto& [kind, words, mistake] : mistakes) {
    const CaseData data = case_named(kind);
    const auto layer = open_case(data);
    const std::vector<uint8_t> before = run_case(*layer, data);
    ExpertSource source = data.expert(1);
    mistake(source);
    EXPECT_THAT(layer->replace_expert(0, source).message(), HasSubstr(words));
    EXPECT_EQ(run_case(*layer, data), before);
  }
}

TEST(ExpertKind, TheCInterfaceRefusesArraysThatDoNotFit) {
  const struct {
    const char *kind, *words;
    std::function<void(CCase&)> mistake;
  } mistakes[] = {
      {kBiases, "gate_up_biases_stride: expected 0 or at least",
       [](auto& c) { c.tensors.gate_up_biases_stride = 4; }},
      {kBiases, "gate_up_biases_stride: expected a multiple of 4",
       [](auto& c) { c.tensors.gate_up_biases_stride += 2; }},
      {kBiases, "up_biases", [](auto& c) { c.tensors.up_biases = nullptr; }},
      {kBiases, "gate_biases: expected null (expert_biases 0)",
       [](auto& c) { c.config.expert_biases = 0; }},
      {kBiases, "expert_biases: expected 0 or 1, got 2",
       [](auto& c) { c.config.expert_biases = 2; }},
      {kRelu2, "gate_tensor_scales: expected null with activation relu2",
       [](auto& c) { c.tensors.gate_tensor_scales = c.scales[1].data(); }},
      {kRelu2Biases, "gate_biases: expected null (no gate)",
       [](auto& c) { c.tensors.gate_biases = c.tensors.up_biases; }},
      {kRelu2, "gate_codes", [](auto& c) { c.config.activation = NVFP4_MOE_ACTIVATION_SWIGLU; }},
  };
  for (const auto& [kind, words, mistake] : mistakes) {
    const CaseData data = case_named(kind);
    CCase c(data);
    mistake(c);
    EXPECT_EQ(c.try_open(), kInvalid) << words;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(words));
  }
  const CaseData data = case_named(kRelu2);
  const CCase c(data);
  nvfp4_moe::Layer layer = c.open();
  nvfp4_moe_expert expert = CExperts::expert(data.expert(0));
  EXPECT_NO_THROW(layer.replace_expert(1, expert)) << nvfp4_moe_last_error();
  expert.gate_codes = expert.up_codes;
  EXPECT_THROW(layer.replace_expert(1, expert), nvfp4_moe::Error);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("gate_codes: expected null with activation relu2"));
}

TEST(Relu2, HasNeitherAGateNorABound) {
  EXPECT_THAT(GatedActivation::make({.activation = Activation::kRelu2}).status().message(),
              HasSubstr("activation: expected one of gate and up, got relu2"));
  const CaseData data = case_named(kRelu2);
  MoeOptions fixed = data.spec.options, gated = data.spec.options;
  fixed.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_THAT(resolve_activation_scales(*MoeConfig::make(fixed), {}).status().message(),
              HasSubstr("intermediate_scale fixed without a given power of two"));
  gated.activation = Activation::kSwiglu;
  const auto packed_bytes = [&](const MoeConfig& config) {
    return kReferenceBackend.packed_bytes(config, data.spec.range);
  };
  EXPECT_EQ(3 * packed_bytes(data.config), 2 * packed_bytes(*MoeConfig::make(gated)));
}

}  // namespace
}  // namespace nvfp4_moe::internal
