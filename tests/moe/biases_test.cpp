// Expert biases through every face of a layer: what goes in comes back, runs alike from C++, C and a repro file, and what
// is wrong is told. Their arithmetic is judged by tests/steps and tests/layer.
#include <cstring>
#include <limits>

#include "cases/cases.h"
#include "moe/cache_key.h"
#include "moe/case_layer.h"
#include "moe/config_json.h"
#include "nvfp4_moe/nvfp4_moe.hpp"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

CaseData case_data() {
  auto data = make_case(cases_named("w4a16_biases_oai/e8").front());
  EXPECT_OK(data);
  return *std::move(data);
}

TEST(Biases, ChangeTheOutputAndComeBack) {
  const CaseData data = case_data();
  CaseData without = data;
  without.config = [&] {
    MoeOptions options = data.spec.options;
    options.expert_biases = false;
    return MoeConfig::make(options).value();
  }();
  for (ExpertBuffers& expert : without.experts)
    for (std::vector<float>* bias : {&expert.gate_bias, &expert.up_bias, &expert.down_bias}) bias->clear();
  for (const char* backend : {"reference", "cpu"}) {
    const auto layer = open_case(data, backend);
    ASSERT_NE(layer, nullptr);
    EXPECT_NE(run_case(*layer, data), run_case(*open_case(without, backend), without));
    EXPECT_THAT(layer->describe_json(), HasSubstr("\"expert_biases\":true"));
    const auto again = MoeLayer::open(data.config, unpacked_source(*layer), tiny_layer_options(data.spec.tokens));
    ASSERT_OK(again);
    for (int64_t e = 0; e < data.spec.range.count; ++e) {
      ExpertBuffers out;
      ASSERT_OK((*again)->unpack_expert(e, out));
      EXPECT_EQ(out.gate_bias, data.experts[static_cast<size_t>(e)].gate_bias);
      EXPECT_EQ(out.up_bias, data.experts[static_cast<size_t>(e)].up_bias);
      EXPECT_EQ(out.down_bias, data.experts[static_cast<size_t>(e)].down_bias);
    }
  }
}

TEST(Biases, AreReplacedWithTheirExpert) {
  const CaseData data = case_data();
  CaseData other = data;
  for (ExpertBuffers& expert : other.experts)
    for (float& bias : expert.down_bias) bias += 1.0f;
  const auto layer = open_case(data);
  ASSERT_NE(layer, nullptr);
  for (int64_t e = 0; e < data.spec.range.count; ++e) ASSERT_OK(layer->replace_expert(e, other.expert(e)));
  EXPECT_EQ(run_case(*layer, data), run_case(*open_case(other), data));
}

TEST(Biases, WhatIsWrongWithThemIsTold) {
  const CaseData data = case_data();
  const auto layer = open_case(data);
  ASSERT_NE(layer, nullptr);
  const std::vector<uint8_t> before = run_case(*layer, data);
  ExpertSource source = data.expert(0);
  source.biases.up = nullptr;
  EXPECT_EQ(layer->replace_expert(0, source).message(), "up bias: expected one (expert_biases), got none");
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> down = data.experts[0].down_bias;
    down[3] = bad;
    source = data.expert(0);
    source.biases.down = down.data();
    const Status status = layer->replace_expert(0, source);
    EXPECT_EQ(status.code(), Code::kBadInput);
    EXPECT_THAT(status.message(), HasSubstr("down bias: expected finite numbers"));
    EXPECT_THAT(status.message(), HasSubstr("at row 3"));
  }
  EXPECT_EQ(run_case(*layer, data), before);
  TinyLayer tiny;
  auto plain = MoeLayer::open(tiny.config(), tiny.source(), tiny_layer_options());
  ASSERT_OK(plain);
  source = tiny.experts[0].source();
  const std::vector<float> bias(48);
  source.biases.gate = bias.data();
  EXPECT_THAT((*plain)->replace_expert(0, source).message(), HasSubstr("gate bias: expected none"));
}

TEST(Biases, AreInTheConfigsJsonWhereTheyAreSet) {
  MoeOptions options = tiny_options();
  EXPECT_EQ(to_json(options).find("expert_biases"), std::string::npos);
  options.expert_biases = true;
  const auto back = moe_options_from_json(to_json(options));
  ASSERT_OK(back);
  EXPECT_EQ(*back, options);
}

TEST(Biases, TravelInAReproFile) { expect_to_travel_in_a_repro_file(case_data()); }

// gate and up as halves of one (E, 2I) array, as models store them.
TEST(Biases, ThroughTheCInterface) {
  const CaseData data = case_data();
  const MoeOptions& o = data.spec.options;
  const auto E = static_cast<size_t>(o.num_experts), I = static_cast<size_t>(o.intermediate_size);
  std::vector<uint8_t> codes[3], scales[3];
  std::vector<float> tensor_scales[3], gate_up, down;
  for (size_t e = 0; e < E; ++e) {
    const ExpertBuffers& expert = data.experts[e];
    const TensorScales& tensor = data.tensor_scales[e];
    const Nvfp4Buffers* matrices[] = {&expert.gate, &expert.up, &expert.down};
    const float of[] = {tensor.gate, tensor.up, tensor.down};
    for (size_t p = 0; p < 3; ++p) {
      codes[p].insert(codes[p].end(), matrices[p]->codes.begin(), matrices[p]->codes.end());
      scales[p].insert(scales[p].end(), matrices[p]->block_scales.begin(), matrices[p]->block_scales.end());
      tensor_scales[p].push_back(of[p]);
    }
    gate_up.insert(gate_up.end(), expert.gate_bias.begin(), expert.gate_bias.end());
    gate_up.insert(gate_up.end(), expert.up_bias.begin(), expert.up_bias.end());
    down.insert(down.end(), expert.down_bias.begin(), expert.down_bias.end());
  }
  auto config = nvfp4_moe::make<nvfp4_moe_config>();
  config.num_experts = o.num_experts;
  config.top_k = o.top_k;
  config.hidden_size = o.hidden_size;
  config.intermediate_size = o.intermediate_size;
  config.activation = static_cast<int32_t>(o.activation);
  config.swiglu_limit = *o.swiglu_limit;
  config.activation_format = static_cast<int32_t>(o.activation_format);
  config.expert_biases = 1;
  auto tensors = nvfp4_moe::make<nvfp4_moe_layer_tensors>();
  tensors.gate_codes = codes[0].data();
  tensors.gate_block_scales = scales[0].data();
  tensors.gate_tensor_scales = tensor_scales[0].data();
  tensors.up_codes = codes[1].data();
  tensors.up_block_scales = scales[1].data();
  tensors.up_tensor_scales = tensor_scales[1].data();
  tensors.down_codes = codes[2].data();
  tensors.down_block_scales = scales[2].data();
  tensors.down_tensor_scales = tensor_scales[2].data();
  tensors.gate_biases = gate_up.data();
  tensors.up_biases = gate_up.data() + I;
  tensors.down_biases = down.data();
  tensors.gate_up_biases_stride = static_cast<int64_t>(2 * I * sizeof(float));
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = data.spec.tokens;
  options.backend = "cpu";
  nvfp4_moe_layer* layer = nullptr;
  ASSERT_EQ(nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer), NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  std::vector<float> gate(I), of_down(static_cast<size_t>(o.hidden_size));
  auto unpacked = nvfp4_moe::make<nvfp4_moe_expert_out>();
  unpacked.gate_bias = gate.data();
  unpacked.down_bias = of_down.data();
  for (size_t e = 0; e < E; ++e) {
    ASSERT_EQ(nvfp4_moe_layer_unpack_expert(layer, static_cast<int64_t>(e), &unpacked), NVFP4_MOE_STATUS_OK);
    EXPECT_EQ(gate, data.experts[e].gate_bias);
    EXPECT_EQ(of_down, data.experts[e].down_bias);
  }
  nvfp4_moe_layer_close(layer);

  const auto refused = [&](const char* words) {
    nvfp4_moe_layer* none = nullptr;
    EXPECT_EQ(nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &none), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(none, nullptr);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(words));
  };
  tensors.gate_up_biases_stride = 4;
  refused("gate_up_biases_stride: expected 0 or at least");
  tensors.gate_up_biases_stride = static_cast<int64_t>(2 * I * sizeof(float)) + 2;
  refused("gate_up_biases_stride: expected a multiple of 4");
  tensors.gate_up_biases_stride = 0;
  tensors.up_biases = nullptr;
  refused("up_biases");
  tensors.up_biases = gate_up.data();
  config.expert_biases = 0;
  refused("gate_biases: expected null (expert_biases 0)");
  config.expert_biases = 2;
  refused("expert_biases: expected 0 or 1, got 2");
}

}  // namespace
}  // namespace nvfp4_moe::internal
