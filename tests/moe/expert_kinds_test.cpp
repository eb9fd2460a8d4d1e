// Experts with biases, without a gate (relu2), and both, through every interface of a layer:
// weights unpack unchanged, runs are the same from C++, C and a repro file, and errors are refused.
// tests/steps and tests/layer test their arithmetic.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
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
using testing::HasSubstr;

constexpr const char *kBiases = "w4a16_biases_oai/e8", *kRelu2 = "w4a4_relu2_shared_ep_i64/e8",
                     *kRelu2Biases = "w4a4_relu2_biases_shared/e8";

CaseData case_named(const char* name) { return make_case(cases_named(name).front()).value(); }

LayerOptions options_of(const CaseData& data, const char* backend) {
  LayerOptions options = tiny_layer_options(data.spec.tokens);
  options.backend = backend;
  options.range = data.spec.range;
  return options;
}
std::unique_ptr<MoeLayer> open_case(const CaseData& data, const char* backend = "cpu") {
  return MoeLayer::open(data.config, source_of(data), options_of(data, backend)).value();
}
std::vector<uint8_t> run_case(const MoeLayer& layer, const CaseData& data) {
  std::vector<uint8_t> out(data.out_bytes());
  EXPECT_OK(run_in(workspace_of(layer), layer, data.batch(out.data())));
  return out;
}

class ExpertKinds : public testing::TestWithParam<const char*> {
 protected:
  const ExpertBuffers& of(int64_t e) const {
    return data.experts[static_cast<size_t>(e == kSharedExpert ? data.spec.range.count : e)];
  }
  int64_t first() const {
    return data.spec.options.shared_intermediate_size > 0 ? kSharedExpert : 0;
  }
  void expect_experts(const MoeLayer& layer) const {
    for (int64_t e = first(); e < data.spec.range.count; ++e) {
      ExpertBuffers out;
      ASSERT_OK(layer.unpack_expert(e, out));
      EXPECT_EQ(out.gate.codes, of(e).gate.codes);
      EXPECT_EQ(out.gate.block_scales, of(e).gate.block_scales);
      if (out.gate.codes.empty()) {
        EXPECT_EQ(out.scales.gate, 1.0f);
      }
      EXPECT_EQ(out.up.codes, of(e).up.codes);
      EXPECT_EQ(out.down.block_scales, of(e).down.block_scales);
      EXPECT_EQ(out.gate_bias, of(e).gate_bias);
      EXPECT_EQ(out.up_bias, of(e).up_bias);
      EXPECT_EQ(out.down_bias, of(e).down_bias);
    }
  }
  CaseData data = case_named(GetParam());
};

TEST_P(ExpertKinds, ComeBack) {
  for (const char* backend : {"reference", "cpu"}) {
    const auto layer = open_case(data, backend);
    expect_experts(*layer);
    expect_experts(
        *MoeLayer::open(data.config, unpacked_source(*layer), options_of(data, "cpu")).value());
  }
}

TEST_P(ExpertKinds, AreReplacedInPlace) {
  CaseData other = data;
  std::swap(other.experts[0], other.experts[1]);
  std::swap(other.tensor_scales[0], other.tensor_scales[1]);
  const auto layer = open_case(data);
  EXPECT_NE(run_case(*layer, data), run_case(*open_case(other), data));
  for (int64_t e = first(); e < data.spec.range.count; ++e)
    ASSERT_OK(layer->replace_expert(e, other.expert(e)));
  EXPECT_EQ(run_case(*layer, data), run_case(*open_case(other), data));
}

TEST_P(ExpertKinds, TravelInAReproFile) {
  const auto layer = open_case(data, "reference");
  std::vector<uint8_t> out = run_case(*layer, data);
  TempDir directory;
  const std::string path = directory.file("repro.safetensors");
  ASSERT_OK(write_repro(path, *layer, data.batch(out.data()), true));
  const auto report = replay(path, "reference"), on_cpu = replay(path, "cpu");
  ASSERT_OK(report);
  EXPECT_TRUE(report->passed());
  EXPECT_EQ(report->same_bits, true);
  ASSERT_OK(on_cpu);
  EXPECT_TRUE(on_cpu->passed());
}

TEST_P(ExpertKinds, ThroughTheCInterface) {
  const CCase c(data);
  nvfp4_moe::Layer layer = c.open();
  std::vector<uint8_t> up(of(0).up.codes.size());
  std::vector<float> gate_bias(of(0).gate_bias.size()), down_bias(of(0).down_bias.size());
  for (int64_t e = 0; e < data.spec.range.count; ++e) {
    auto unpacked = nvfp4_moe::make<nvfp4_moe_expert_out>();
    unpacked.up_codes = up.data();
    unpacked.gate_bias = gate_bias.data();
    unpacked.down_bias = down_bias.data();
    layer.unpack_expert(e, unpacked);
    EXPECT_EQ(up, of(e).up.codes);
    EXPECT_EQ(gate_bias, of(e).gate_bias);
    EXPECT_EQ(down_bias, of(e).down_bias);
    if (of(e).gate.codes.empty()) {
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
      {kRelu2, "gate_biases: expected null",
       [](auto& c) { c.tensors.gate_biases = c.scales[1].data(); }},
      {kRelu2Biases, "gate_biases: expected null (no gate)",
       [](auto& c) { c.tensors.gate_biases = c.tensors.up_biases; }},
      {kRelu2, "up_biases", [](auto& c) { c.config.expert_biases = 1; }},
      {kRelu2, "gate_codes", [](auto& c) { c.config.activation = NVFP4_MOE_ACTIVATION_SWIGLU; }},
  };
  for (const auto& [kind, words, mistake] : mistakes) {
    const CaseData data = case_named(kind);
    CCase c(data);
    mistake(c);
    EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_INVALID_ARGUMENT) << words;
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

TEST(Relu2, TakesTwoThirds) {
  const CaseData data = case_named(kRelu2);
  MoeOptions gated = data.spec.options;
  gated.activation = Activation::kSwiglu;
  for (const Backend* backend : {&kReferenceBackend, &kCpuBackend}) {
    // Panels of 16 rows and chunks of 64 along K round up, separately for each matrix.
    const double share =
        static_cast<double>(backend->packed_bytes(data.config, data.spec.range)) /
        static_cast<double>(backend->packed_bytes(*MoeConfig::make(gated), data.spec.range));
    EXPECT_NEAR(share, 2.0 / 3, backend == &kReferenceBackend ? 0 : 0.05);
  }
}

TEST(Relu2, EveryGpuBackendTakesIt) {
  for (const Backend* backend : backends()) {
    if (backend->memory == nullptr) continue;
    int taken = 0;
    for (const int capability : {80, 90, 100, 120})
      taken += backend->supports(case_named(kRelu2).config, gpu_of(capability)).ok();
    EXPECT_GE(taken, 1) << backend->name;
  }
}

TEST(Relu2, HasNeitherAGateNorABound) {
  EXPECT_THAT(GatedActivation::make(Activation::kRelu2, std::nullopt, 1.702f).status().message(),
              HasSubstr("activation: expected one of gate and up, got relu2"));
  MoeOptions options = case_named(kRelu2).spec.options;
  options.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_THAT(resolve_activation_scales(*MoeConfig::make(options), {}).status().message(),
              HasSubstr("intermediate_scale fixed without a given power of two"));
}

}  // namespace
}  // namespace nvfp4_moe::internal
