// relu2, layers whose experts have no gate, through every face: what goes in comes back, runs alike from C++, C and a repro
// file, and what is wrong is told. Their arithmetic is judged by tests/steps and tests/layer.
#include <cstring>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "core/activation.h"
#include "moe/case_layer.h"
#include "moe/config_json.h"
#include "moe/formats.h"
#include "nvfp4_moe/nvfp4_moe.hpp"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

// With a shared expert of its own size, in the middle of the experts.
CaseData case_data(const std::string& name = "w4a4_relu2_shared_ep_i64/e8") {
  auto data = make_case(cases_named(name).front());
  EXPECT_OK(data);
  return *std::move(data);
}

void expect_experts(const MoeLayer& layer, const CaseData& data) {
  for (int64_t e = kSharedExpert; e < data.spec.range.count; ++e) {
    ExpertBuffers out;
    ASSERT_OK(layer.unpack_expert(e, out));
    const ExpertBuffers& in = data.experts[static_cast<size_t>(e == kSharedExpert ? data.spec.range.count : e)];
    EXPECT_TRUE(out.gate.codes.empty() && out.gate.block_scales.empty());
    EXPECT_EQ(out.scales.gate, 1.0f);
    EXPECT_EQ(out.up.codes, in.up.codes);
    EXPECT_EQ(out.down.block_scales, in.down.block_scales);
  }
}

TEST(Relu2, ComesBackAndTakesTwoThirds) {
  const CaseData data = case_data();
  for (const char* backend : {"reference", "cpu"}) {
    const auto layer = open_case(data, backend);
    ASSERT_NE(layer, nullptr);
    expect_experts(*layer, data);
    EXPECT_THAT(layer->describe_json(), HasSubstr("\"activation\":\"relu2\""));
    const auto again = [&] {
      LayerOptions options = tiny_layer_options(data.spec.tokens);
      options.range = data.spec.range;
      return MoeLayer::open(data.config, unpacked_source(*layer), options);
    }();
    ASSERT_OK(again);
    expect_experts(**again, data);
    MoeOptions gated = data.spec.options;
    gated.activation = Activation::kSwiglu;
    // Panels of 16 rows and chunks of 64 along K round up, each matrix by itself.
    const double share = static_cast<double>(layer->backend().packed_bytes(data.config, data.spec.range)) /
                         static_cast<double>(layer->backend().packed_bytes(*MoeConfig::make(gated), data.spec.range));
    EXPECT_NEAR(share, 2.0 / 3, std::string(backend) == "reference" ? 0 : 0.05);
  }
}

TEST(Relu2, IsReplacedInPlace) {
  const CaseData data = case_data();
  CaseData other = data;
  std::swap(other.experts[0], other.experts[1]);
  std::swap(other.tensor_scales[0], other.tensor_scales[1]);
  const auto layer = open_case(data);
  ASSERT_NE(layer, nullptr);
  EXPECT_NE(run_case(*layer, data), run_case(*open_case(other), data));
  for (int64_t e = kSharedExpert; e < data.spec.range.count; ++e) ASSERT_OK(layer->replace_expert(e, other.expert(e)));
  EXPECT_EQ(run_case(*layer, data), run_case(*open_case(other), data));
}

TEST(Relu2, AGateIsRefused) {
  const CaseData data = case_data();
  const auto layer = open_case(data);
  ASSERT_NE(layer, nullptr);
  ExpertSource source = data.expert(0);
  source.gate = source.up;
  EXPECT_THAT(layer->replace_expert(0, source).message(),
              HasSubstr("gate: expected none with activation relu2, got (48, 64)"));
  // A bias for it too, and a source without a gate where one belongs.
  const CaseData biased = case_data("w4a4_relu2_biases_shared/e8");
  const auto with_biases = open_case(biased);
  ASSERT_NE(with_biases, nullptr);
  source = biased.expert(0);
  source.biases.gate = source.biases.up;
  EXPECT_THAT(with_biases->replace_expert(0, source).message(), HasSubstr("gate bias: expected none"));
  TinyLayer tiny;
  auto plain = MoeLayer::open(tiny.config(), tiny.source(), tiny_layer_options());
  ASSERT_OK(plain);
  source = tiny.experts[0].source();
  source.gate = {};
  EXPECT_THAT((*plain)->replace_expert(0, source).message(), HasSubstr("gate: expected (48, 64), got (0, 0)"));
}

TEST(Relu2, AnExpertsBiasesComeBackWithoutTheGates) {
  const CaseData data = case_data("w4a4_relu2_biases_shared/e8");
  for (const char* backend : {"reference", "cpu"}) {
    const auto layer = open_case(data, backend);
    ASSERT_NE(layer, nullptr);
    for (int64_t e = 0; e < data.spec.range.count; ++e) {
      ExpertBuffers out;
      ASSERT_OK(layer->unpack_expert(e, out));
      EXPECT_TRUE(out.gate_bias.empty());
      EXPECT_EQ(out.up_bias, data.experts[static_cast<size_t>(e)].up_bias);
      EXPECT_EQ(out.down_bias, data.experts[static_cast<size_t>(e)].down_bias);
    }
  }
}

// Whichever of this build's GPU backends the device is for.
// Of its own GPUs, whichever they are.
TEST(Relu2, EveryGpuBackendTakesIt) {
  const CaseData data = case_data();
  for (const Backend* backend : backends()) {
    if (backend->memory == nullptr) continue;
    int taken = 0;
    for (const int capability : {80, 90, 100, 120}) taken += backend->supports(data.config, gpu_of(capability)).ok();
    EXPECT_GE(taken, 1) << backend->name;
  }
}

// The op that takes gate and up side by side has nothing to take.
TEST(Relu2, IsNoGatedActivation) {
  EXPECT_THAT(GatedActivation::make(Activation::kRelu2, std::nullopt, 1.702f).status().message(),
              HasSubstr("activation: expected one of gate and up, got relu2"));
}

TEST(Relu2, TravelsInAReproFile) { expect_to_travel_in_a_repro_file(case_data()); }

// fixed: there is no limit to bound relu(u)^2, so that the checkpoint's scale, or a given one, is needed.
TEST(Relu2, HasNoBoundForAFixedScale) {
  MoeOptions options = case_data().spec.options;
  options.intermediate_scale = IntermediateScale::kFixed;
  const auto scales = resolve_activation_scales(*MoeConfig::make(options), {});
  EXPECT_THAT(scales.status().message(), HasSubstr("intermediate_scale fixed without a given power of two"));
}

TEST(Relu2, ThroughTheCInterface) {
  const CaseData data = case_data("w4a4_relu2/e8");
  const MoeOptions& o = data.spec.options;
  std::vector<uint8_t> codes[2], scales[2];
  std::vector<float> tensor_scales[2];
  for (size_t e = 0; e < data.experts.size(); ++e) {
    const Nvfp4Buffers* matrices[] = {&data.experts[e].up, &data.experts[e].down};
    const float of[] = {data.tensor_scales[e].up, data.tensor_scales[e].down};
    for (size_t p = 0; p < 2; ++p) {
      codes[p].insert(codes[p].end(), matrices[p]->codes.begin(), matrices[p]->codes.end());
      scales[p].insert(scales[p].end(), matrices[p]->block_scales.begin(), matrices[p]->block_scales.end());
      tensor_scales[p].push_back(of[p]);
    }
  }
  auto config = nvfp4_moe::make<nvfp4_moe_config>();
  config.num_experts = o.num_experts;
  config.top_k = o.top_k;
  config.hidden_size = o.hidden_size;
  config.intermediate_size = o.intermediate_size;
  config.activation = NVFP4_MOE_ACTIVATION_RELU2;
  auto tensors = nvfp4_moe::make<nvfp4_moe_layer_tensors>();
  tensors.up_codes = codes[0].data();
  tensors.up_block_scales = scales[0].data();
  tensors.up_tensor_scales = tensor_scales[0].data();
  tensors.down_codes = codes[1].data();
  tensors.down_block_scales = scales[1].data();
  tensors.down_tensor_scales = tensor_scales[1].data();
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = data.spec.tokens;
  options.backend = "cpu";
  nvfp4_moe_layer* layer = nullptr;
  ASSERT_EQ(nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer), NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  std::vector<uint8_t> up(data.experts[1].up.codes.size());
  auto unpacked = nvfp4_moe::make<nvfp4_moe_expert_out>();
  unpacked.up_codes = up.data();
  ASSERT_EQ(nvfp4_moe_layer_unpack_expert(layer, 1, &unpacked), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(up, data.experts[1].up.codes);
  EXPECT_EQ(unpacked.gate_tensor_scale, 1.0f);

  size_t workspace_bytes = 0;
  ASSERT_EQ(nvfp4_moe_layer_workspace_bytes(layer, data.spec.tokens, &workspace_bytes), NVFP4_MOE_STATUS_OK);
  const auto workspace = allocate_pages(workspace_bytes);
  ASSERT_OK(workspace);
  std::vector<uint8_t> out(data.out_bytes());
  auto batch = nvfp4_moe::make<nvfp4_moe_batch>();
  batch.tokens = data.spec.tokens;
  batch.hidden = data.hidden.data();
  batch.topk_ids = data.topk_ids.data();
  batch.topk_weights = data.topk_weights.data();
  batch.out = out.data();
  ASSERT_EQ(nvfp4_moe_layer_run(layer, &batch, workspace->data(), workspace_bytes, nullptr), NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  EXPECT_EQ(out, run_case(*open_case(data), data));

  auto expert = nvfp4_moe::make<nvfp4_moe_expert>();
  expert.up_codes = codes[0].data();
  expert.up_block_scales = scales[0].data();
  expert.up_tensor_scale = tensor_scales[0][0];
  expert.down_codes = codes[1].data();
  expert.down_block_scales = scales[1].data();
  expert.down_tensor_scale = tensor_scales[1][0];
  EXPECT_EQ(nvfp4_moe_layer_replace_expert(layer, 1, &expert), NVFP4_MOE_STATUS_OK) << nvfp4_moe_last_error();
  expert.gate_codes = codes[0].data();
  EXPECT_EQ(nvfp4_moe_layer_replace_expert(layer, 1, &expert), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("gate_codes: expected null with activation relu2"));
  nvfp4_moe_layer_close(layer);

  const auto refused = [&](const char* words) {
    nvfp4_moe_layer* none = nullptr;
    EXPECT_EQ(nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &none), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(none, nullptr);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(words));
  };
  tensors.gate_tensor_scales = tensor_scales[0].data();
  refused("gate_tensor_scales: expected null with activation relu2");
  tensors.gate_tensor_scales = nullptr;
  tensors.gate_biases = tensor_scales[0].data();
  refused("gate_biases: expected null");
  config.expert_biases = 1;
  refused("gate_biases: expected null (no gate)");
  tensors.gate_biases = nullptr;
  refused("up_biases");
  config.expert_biases = 0;
  config.activation = NVFP4_MOE_ACTIVATION_SWIGLU;
  refused("gate_codes");
  config.activation = 5;
  refused("activation: expected 0 to 4, got 5");
}

}  // namespace
}  // namespace nvfp4_moe::internal
