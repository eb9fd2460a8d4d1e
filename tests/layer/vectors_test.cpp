// The committed layers that torch computed (tests/vectors/make_layer_vectors.py): the reference
// gives the same bits, every other host backend stays within the limits of a whole layer.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "judge/judge.h"
#include "safetensors/safetensors.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/read_tensor.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kVectorExperts = 4, kVectorTopK = 2, kVectorHidden = 128,
                  kVectorIntermediate = 80, kTokens = 12;

class Vectors {
 public:
  Vectors()
      : file_(SafetensorsFile::open(NVFP4_MOE_SOURCE_DIR "/tests/vectors/layers.safetensors")) {}
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
    const auto one = static_cast<std::ptrdiff_t>(all.size() / kVectorExperts);
    return {all.begin() + e * one, all.begin() + (e + 1) * one};
  }

  CaseData data(const MoeOptions& options) const {
    Case spec;
    spec.name = "vectors";
    spec.options = options;
    spec.range = {0, kVectorExperts};
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
    for (int64_t e = 0; e < kVectorExperts; ++e) {
      const auto matrix = [&](const std::string& name) {
        return Nvfp4Buffers{expert(name + ".codes", e), expert(name + ".scales", e)};
      };
      data.experts.push_back({matrix("gate"), matrix("up"), matrix("down"), {}, {}, {}, {}});
      const auto index = static_cast<size_t>(e);
      data.tensor_scales.push_back({floats("gate.tensor_scale")[index],
                                    floats("up.tensor_scale")[index],
                                    floats("down.tensor_scale")[index]});
    }
    return data;
  }

 private:
  Result<SafetensorsFile> file_;
};

struct Layer {
  const char* name;
  ActivationFormat format = ActivationFormat::kNvfp4;
  Activation activation = Activation::kSwiglu;
  float limit = 0;
  RouterWeight router_weight = RouterWeight::kAfterDown;
  RowFormat row_format = RowFormat::kBf16;
  ActivationScale activation_scale = ActivationScale::kDynamicToken;
  IntermediateScale intermediate_scale = IntermediateScale::kDynamicToken;

  MoeOptions options() const {
    MoeOptions o = test::sizes_of(kVectorExperts, kVectorTopK, kVectorHidden, kVectorIntermediate);
    o.activation_format = format;
    o.activation = activation;
    if (limit > 0) o.swiglu_limit = limit;
    o.router_weight = router_weight;
    o.row_format = row_format;
    o.activation_scale = activation_scale;
    o.intermediate_scale = intermediate_scale;
    return o;
  }
};
constexpr ActivationFormat kBf16 = ActivationFormat::kBf16, kInt8 = ActivationFormat::kInt8Block;
constexpr RouterWeight kBefore = RouterWeight::kBeforeDown;
constexpr Layer kLayers[] = {
    {"w4a4"},
    {.name = "w4a4_clamped_fixed_before_down",
     .activation = Activation::kSwigluClamped,
     .limit = 2,
     .router_weight = kBefore,
     .intermediate_scale = IntermediateScale::kFixed},  // 4 / 2688 -> 2^-9
    {.name = "w4a4_oai_static",
     .activation = Activation::kSwigluOai,
     .limit = 1.5f,
     .activation_scale = ActivationScale::kStatic},
    {.name = "w4a4_rows_fp32", .row_format = RowFormat::kFp32},
    {"w4a16_clamped", kBf16, Activation::kSwigluClamped, 1.5f},
    {"w4a16_step_before_down", kBf16, Activation::kSwigluStep, 1, kBefore},
    {"w4a8", kInt8},
    {"w4a8_clamped_before_down", kInt8, Activation::kSwigluClamped, 2, kBefore},
    {.name = "w4a8_rows_fp32", .format = kInt8, .row_format = RowFormat::kFp32},
};

class LayerVectors : public test::BackendTest {};

TEST_P(LayerVectors, AgreeWithTorch) {
  const Vectors vectors;
  ASSERT_OK(vectors.status());
  for (const Layer& layer : kLayers) {
    SCOPED_TRACE(layer.name);
    const CaseData data = vectors.data(layer.options());
    if (test::declines(backend(), data.config)) continue;
    const std::vector<uint8_t> expected = vectors.bytes(std::string("out.") + layer.name);
    test::CaseRun host(backend(), data);
    ASSERT_TRUE(host.ok());
    const std::vector<uint8_t> actual = host.run(data);
    ASSERT_EQ(expected.size(), actual.size());
    if (&backend() == &kReferenceBackend) {
      EXPECT_EQ(test::difference(expected, actual, DType::kBf16, kVectorHidden), "");
      continue;
    }
    const std::vector<float> e = test::to_floats(expected, DType::kBf16),
                             a = test::to_floats(actual, DType::kBf16);
    EXPECT_EQ(broken_limit(compare(e.data(), a.data(), kTokens, kVectorHidden),
                           layer_limits(data.config, kTokens)),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LayerVectors, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
