// The committed layers that torch computed (tests/vectors/make_layer_vectors.py): the reference gives them bit for bit, every
// other host backend within the limits of a whole layer.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "judge/judge.h"
#include "safetensors/safetensors.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kExperts = 4, kTopK = 2, kHidden = 128, kIntermediate = 80, kTokens = 12;

class Vectors {
 public:
  Vectors() : file_(SafetensorsFile::open(NVFP4_MOE_SOURCE_DIR "/tests/vectors/layers.safetensors")) {}
  bool ok() const { return file_.ok(); }
  const Status& status() const { return file_.status(); }

  std::vector<uint8_t> bytes(const std::string& name) const {
    const TensorInfo* info = file_->find(name);
    EXPECT_NE(info, nullptr) << name;
    if (info == nullptr) return {};
    return test::read_tensor<uint8_t>(*file_, *info);
  }
  std::vector<float> floats(const std::string& name) const {
    const std::vector<uint8_t> raw = bytes(name);
    std::vector<float> values(raw.size() / sizeof(float));
    std::memcpy(values.data(), raw.data(), raw.size());
    return values;
  }
  // Expert e's part of a stacked tensor.
  std::vector<uint8_t> expert(const std::string& name, int64_t e) const {
    const std::vector<uint8_t> all = bytes(name);
    const auto one = static_cast<std::ptrdiff_t>(all.size() / kExperts);
    return {all.begin() + e * one, all.begin() + (e + 1) * one};
  }

  CaseData data(const MoeOptions& options) const {
    Case spec;
    spec.name = "vectors";
    spec.options = options;
    spec.range = {0, kExperts};
    spec.tokens = kTokens;
    const std::vector<float> input_scales = floats("input_scales");
    CaseData data{spec,
                  *MoeConfig::make(options),
                  {input_scales[0], input_scales[1]},
                  {},
                  {},
                  bytes("hidden"),
                  bytes("topk_ids"),
                  floats("topk_weights"),
                  {}};
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto matrix = [&](const std::string& name) {
        return Nvfp4Buffers{expert(name + ".codes", e), expert(name + ".scales", e)};
      };
      data.experts.push_back({matrix("gate"), matrix("up"), matrix("down"), {}});
      const auto index = static_cast<size_t>(e);
      data.tensor_scales.push_back(
          {floats("gate.tensor_scale")[index], floats("up.tensor_scale")[index], floats("down.tensor_scale")[index]});
    }
    return data;
  }

 private:
  Result<SafetensorsFile> file_;
};

struct Layer {
  const char* name;
  std::function<void(MoeOptions&)> choose;
};
const std::vector<Layer>& layers() {
  static const std::vector<Layer> all = {
      {"w4a4", [](MoeOptions&) {}},
      {"w4a4_clamped_fixed_before_down",
       [](MoeOptions& o) {
         o.activation = Activation::kSwigluClamped;
         o.swiglu_limit = 2;
         o.intermediate_scale = IntermediateScale::kFixed;  // 4 / 2688 -> 2^-9
         o.router_weight = RouterWeight::kBeforeDown;
       }},
      {"w4a4_oai_static",
       [](MoeOptions& o) {
         o.activation = Activation::kSwigluOai;
         o.swiglu_limit = 1.5f;
         o.activation_scale = ActivationScale::kStatic;
       }},
      {"w4a4_rows_fp32", [](MoeOptions& o) { o.row_format = RowFormat::kFp32; }},
      {"w4a16_clamped",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kBf16;
         o.activation = Activation::kSwigluClamped;
         o.swiglu_limit = 1.5f;
       }},
      {"w4a16_step_before_down",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kBf16;
         o.activation = Activation::kSwigluStep;
         o.swiglu_limit = 1;
         o.router_weight = RouterWeight::kBeforeDown;
       }},
      {"w4a8", [](MoeOptions& o) { o.activation_format = ActivationFormat::kInt8Block; }},
      {"w4a8_clamped_before_down",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kInt8Block;
         o.activation = Activation::kSwigluClamped;
         o.swiglu_limit = 2;
         o.router_weight = RouterWeight::kBeforeDown;
       }},
      {"w4a8_rows_fp32",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kInt8Block;
         o.row_format = RowFormat::kFp32;
       }},
  };
  return all;
}

class LayerVectors : public test::BackendTest {};

TEST_P(LayerVectors, AgreeWithTorch) {
  const Vectors vectors;
  ASSERT_TRUE(vectors.ok()) << vectors.status().message();
  for (const Layer& layer : layers()) {
    SCOPED_TRACE(layer.name);
    MoeOptions options;
    options.num_experts = kExperts;
    options.top_k = kTopK;
    options.hidden_size = kHidden;
    options.intermediate_size = kIntermediate;
    layer.choose(options);
    const CaseData data = vectors.data(options);
    if (test::declines(backend(), data.config)) continue;
    const std::vector<uint8_t> expected = vectors.bytes(std::string("out.") + layer.name);
    test::CaseRun host(backend(), data);
    ASSERT_TRUE(host.ok());
    const std::vector<uint8_t> actual = host.run(data);
    ASSERT_EQ(expected.size(), actual.size());
    if (&backend() == &kReferenceBackend) {
      EXPECT_EQ(test::difference(expected, actual, DType::kBf16, kHidden), "");
      continue;
    }
    const std::vector<float> e = test::to_floats(expected, DType::kBf16), a = test::to_floats(actual, DType::kBf16);
    EXPECT_EQ(broken_limit(compare(e.data(), a.data(), kTokens, kHidden), layer_limits(data.config, kTokens)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LayerVectors, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
