// Each planted fault, and nothing else, is reported with its own id and tensor. Experts that would
// decode wrongly are refused.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/experts.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {
namespace {

struct Expectation {
  Plant plant;
  std::set<std::string> ids;  // of validate()
  Severity severity = Severity::kError;
  const char* projection = "";  // of the tensor that is named
  const char* part = "";
  bool loads = false;
};

class Planted : public testing::TestWithParam<std::tuple<Expectation, SourceFormat>> {};

ATTACK_TEST_P(kPlantedFaults, Planted, IsToldByItsOwnId) {
  const auto& [expectation, format] = GetParam();
  CheckpointBuilder builder({.model_type = "deepseek_v4", .format = format});
  builder.plant(expectation.plant, 1, 3);
  const Opened checkpoint(builder);

  auto clean = must(checkpoint->validate(0, {0, 8}));
  EXPECT_TRUE(clean->empty()) << to_string(clean->front());

  Result<std::vector<Finding>> findings = checkpoint->validate(1, {0, 8});
  attacked();
  ASSERT_OK(findings);
  EXPECT_EQ(ids(*findings), expectation.ids);
  for (const Finding& finding : *findings) {
    EXPECT_EQ(finding.severity, expectation.severity) << to_string(finding);
    EXPECT_EQ(finding.layer, 1);
    EXPECT_EQ(finding.expert, 3);
    EXPECT_EQ(finding.tensor, builder.tensor_name(1, 3, expectation.projection, expectation.part));
    EXPECT_FALSE(finding.expected.empty());
    EXPECT_FALSE(finding.actual.empty());
  }
  Result<LoadedExpert> loaded = checkpoint->expert(1, 3);
  EXPECT_EQ(loaded.ok(), expectation.loads) << loaded.status().message();
  if (!loaded.ok()) {
    EXPECT_THAT(loaded, Refused(Code::kBadInput, "layer 1 expert 3 "));
    EXPECT_THAT(loaded.status().message(), HasSubstr(": expected "));
    EXPECT_THAT(loaded.status().message(), HasSubstr(", got "));
    EXPECT_EQ(loaded.status().finding(), *expectation.ids.begin());
    EXPECT_THAT(loaded.status().message(), EndsWith(" [" + *expectation.ids.begin() + "]"));
  }
  EXPECT_OK(checkpoint->expert(1, 2));  // its neighbours load
}

constexpr Severity kWarn = Severity::kWarning;
const Expectation kExpectations[] = {
    {Plant::kFlippedCode, {}, Severity::kError, "", "", true},    // a legal value: only `verify
                                                                  // --against` detects it
    {Plant::kScaleTimesTwo, {}, Severity::kError, "", "", true},  // the same
    {Plant::kSwappedGateUp, {}, Severity::kError, "", "", true},  // the same
    {Plant::kTransposedScales, {"shape_mismatch"}, Severity::kError, "down", "scales"},
    {Plant::kReciprocalTensorScale,
     {"reciprocal_scale_direction"},
     Severity::kError,
     "down",
     "tensor_scale"},
    {Plant::kMissingExpert, {"missing_expert"}, Severity::kError, "gate", "codes"},
    {Plant::kMissingInputScale, {"input_scale_missing"}, kWarn, "down", "input_scale", true},
    {Plant::kZeroInputScale, {"input_scale_zero"}, kWarn, "down", "input_scale", true},
    {Plant::kDenormalInputScale, {"input_scale_denormal"}, kWarn, "down", "input_scale", true},
    {Plant::kInfiniteInputScale, {"input_scale_infinite"}, kWarn, "down", "input_scale", true},
    {Plant::kNanInputScale, {"input_scale_nan"}, kWarn, "down", "input_scale", true},
    {Plant::kNegativeInputScale, {"input_scale_negative"}, kWarn, "down", "input_scale", true},
    {Plant::kOneInputScale, {"input_scale_one"}, Severity::kNote, "down", "input_scale", true},
    {Plant::kNanBlockScale, {"block_scale_nan"}, Severity::kError, "up", "scales"},
    {Plant::kNegativeBlockScale, {"block_scale_negative"}, Severity::kError, "up", "scales"},
    {Plant::kNanTensorScale, {"tensor_scale_nonfinite"}, Severity::kError, "gate", "tensor_scale"},
    {Plant::kZeroTensorScale, {"tensor_scale_zero"}, Severity::kError, "gate", "tensor_scale"},
    {Plant::kNegativeTensorScale,
     {"tensor_scale_negative"},
     Severity::kError,
     "gate",
     "tensor_scale"},
    {Plant::kGateUpMismatch,
     {"gate_up_scale_mismatch"},
     Severity::kNote,
     "up",
     "tensor_scale",
     true},
    {Plant::kWrongShape, {"shape_mismatch"}, Severity::kError, "up", "scales"},
    {Plant::kWrongDtype, {"dtype_mismatch"}, Severity::kError, "up", "scales"},
    {Plant::kGroupSize32, {"group_size"}, Severity::kError, "up", "scales"},
    {Plant::kZeroScaleOverCodes, {"zero_scale_nonzero_codes"}, kWarn, "down", "codes", true},
    {Plant::kAllZeroScales, {"all_zero_block_scales"}, Severity::kError, "down", "scales"},
};
INSTANTIATE_TEST_SUITE_P(All, Planted,
                         testing::Combine(testing::ValuesIn(kExpectations),
                                          testing::Values(SourceFormat::kModelOpt,
                                                          SourceFormat::kCompressedTensors)),
                         [](const auto& param) {
                           const bool modelopt =
                               std::get<1>(param.param) == SourceFormat::kModelOpt;
                           return std::string(to_string(std::get<0>(param.param).plant)) +
                                  (modelopt ? "_modelopt" : "_compressed_tensors");
                         });

TEST(Findings, ShiftedExpertsRefuseTheWholeLayer) {
  CheckpointBuilder builder({.model_type = "deepseek_v4"});
  builder.plant(Plant::kShiftedExperts, 1, 0);
  const Opened checkpoint(builder);
  EXPECT_EQ(ids(*checkpoint->validate(1, {0, 8})),
            (std::set<std::string>{"missing_expert", "unexpected_expert"}));
  // Expert 1 exists, but since there is an expert 8 its number may be wrong.
  EXPECT_THAT(
      checkpoint->expert(1, 1),
      Refused(Code::kBadInput,
              "layer 1 expert 8 layers.1.ffn.experts.8.w1.weight: expected experts 0 to 7"));
  EXPECT_OK(checkpoint->expert(0, 1));
}

TEST(Findings, CodesUnderAZeroScaleAreZeroAfterLoading) {
  for (const IntermediateSlice slice : {IntermediateSlice{}, {0, 16}}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.plant(Plant::kZeroScaleOverCodes, 0, 0);  // down, scale 2: row 1, block 0
    std::fill_n(builder.matrix(0, 0, "down").codes.begin() + 16, 8,
                uint8_t{0x70});  // not the lower code of a byte
    const Opened checkpoint(builder);
    auto loaded = must(checkpoint->expert(0, 0, slice));
    ASSERT_EQ(loaded->findings.size(), 1u);
    EXPECT_EQ(loaded->findings[0].id, "zero_scale_nonzero_codes");
    EXPECT_EQ(loaded->findings[0].count, 1);
    EXPECT_FALSE(loaded->storage.empty());
    const Nvfp4View& down = loaded->source.down;
    const std::vector<uint8_t>& before = builder.matrix(0, 0, "down").codes;
    for (int64_t r = 0; r < down.rows; ++r) {
      for (int64_t i = 0; i < down.cols / 2; ++i) {
        const bool cleared = r == 1 && i < 8;
        EXPECT_EQ(down.row_codes(r)[i], cleared ? 0 : before[static_cast<size_t>(r * 16 + i)])
            << r << " " << i;
      }
    }
    EXPECT_EQ(loaded->source.gate.codes_stride, 32);
  }
}

TEST(Findings, LikeOnesFoldPerLayer) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t e : {1, 4, 6}) builder.plant(Plant::kGateUpMismatch, 0, e);
  const Opened checkpoint(builder);
  auto findings = must(checkpoint->validate(0, {0, 8}));
  ASSERT_EQ(findings->size(), 1u);
  EXPECT_EQ(findings->front().expert, 1);
  EXPECT_EQ(findings->front().count, 3);
  EXPECT_THAT(to_string(findings->front()),
              HasSubstr("note gate_up_scale_mismatch: layer 0 expert 1 model.layers.0"));
  EXPECT_THAT(
      to_string(findings->front()),
      HasSubstr("(and 2 more, such as model.layers.0.mlp.experts.4.up_proj.weight_scale_2, "));
  EXPECT_EQ(findings->front().examples.size(), 2u);
  EXPECT_EQ(checkpoint->validate(0, {5, 3})->front().count, 1);  // only the range
  EXPECT_EQ(checkpoint->statistics(0, {0, 8})->gate_up_mismatches, 3);
  EXPECT_EQ(checkpoint->validate(0, {5, 4}).status().code(), Code::kInvalidArgument);
}

TEST(LayerScales, TakeTheLargestUsableOfAllExperts) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
    builder.plant(Plant::kMissingInputScale, 0, 7);  // the builder's largest is the last expert's
    builder.plant(Plant::kInfiniteInputScale, 0, 6);
    const Opened checkpoint(builder);
    std::vector<Finding> findings;
    auto scales = must(checkpoint->layer_scales(0, &findings));
    EXPECT_FLOAT_EQ(*scales->hidden, 0.09f);        // 0.01 * (7 + 2)
    EXPECT_FLOAT_EQ(*scales->intermediate, 0.14f);  // 0.02 * (5 + 2): 7 has no scale, 6 an Inf
    EXPECT_EQ(ids(findings),
              (std::set<std::string>{"input_scale_missing", "input_scale_infinite"}));
  }
}

TEST(LayerScales, NoneUsableIsNulloptAndTold) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (int64_t e = 0; e < 8; ++e) builder.plant(Plant::kZeroInputScale, 0, e);
  const Opened checkpoint(builder);
  std::vector<Finding> findings;
  auto scales = must(checkpoint->layer_scales(0, &findings));
  EXPECT_TRUE(scales->hidden.has_value());
  EXPECT_FALSE(scales->intermediate.has_value());
  EXPECT_EQ(ids(findings), (std::set<std::string>{"input_scale_zero", "input_scale_unusable"}));
  EXPECT_EQ(findings[0].count, 8);
}

TEST(LayerScales, WeightOnlyCheckpointsHaveNone) {
  const Opened checkpoint(CheckpointBuilder({.model_type = "qwen3_moe", .weight_only = true}));
  EXPECT_EQ(checkpoint->model().options.activation_format, ActivationFormat::kBf16);
  std::vector<Finding> findings;
  EXPECT_FALSE(checkpoint->layer_scales(0, &findings)->hidden.has_value());
  EXPECT_TRUE(findings.empty());
  EXPECT_TRUE(checkpoint->validate(0, {0, 8})->empty());
}

TEST(Findings, LosslessMxfp4CastsAndFourOverSixAreNoted) {
  CheckpointBuilder cast({.model_type = "qwen3_moe"});
  CheckpointBuilder four_six({.model_type = "qwen3_moe"});
  for (int64_t e = 0; e < 8; ++e) {
    for (const char* p : {"gate", "up", "down"}) {
      BuiltMatrix& m = cast.matrix(0, e, p);
      for (uint8_t& scale : m.scales) scale &= 0x78;
      m.tensor_scale = 0x1p-12f;
      for (uint8_t& scale : four_six.matrix(0, e, p).scales) scale = std::min<uint8_t>(scale, 0x7C);
    }
  }
  EXPECT_THAT(ids(*Opened(cast)->validate(0, {0, 8})), ElementsAre("power_of_two_scales"));
  EXPECT_THAT(ids(*Opened(four_six)->validate(0, {0, 8})), ElementsAre("four_over_six_scales"));
}

TEST(Findings, Mxfp4BlocksOutOfReachAreCountedAndNanScalesRefused) {
  CheckpointBuilder builder({.model_type = "deepseek_v4", .format = SourceFormat::kMxfp4});
  builder.matrix(0, 2, "up").scales[4] = 100;  // the others are 117 to 122: 22 below the largest
  builder.matrix(0, 2, "up").codes[4 * 16] = 0x77;
  builder.matrix(1, 5, "down").scales[0] = 255;
  const Opened checkpoint(builder);
  const std::vector<Finding> findings = *checkpoint->validate(0, {0, 8});
  ASSERT_EQ(ids(findings), (std::set<std::string>{"mxfp4_block_rounded"}));
  EXPECT_EQ(findings[0].count, 2);  // two 16-blocks
  EXPECT_EQ(checkpoint->expert(0, 2)->findings.at(0).id, "mxfp4_block_rounded");
  EXPECT_EQ(ids(*checkpoint->validate(1, {0, 8})), (std::set<std::string>{"block_scale_nan"}));
  EXPECT_EQ(checkpoint->expert(1, 5).status().code(), Code::kBadInput);
}

TEST(Findings, EveryTensorIsUsedOrListed) {
  CheckpointBuilder builder({.model_type = "deepseek_v4"});
  auto& tensors = builder.tensors();
  tensors["layers.0.ffn.experts.3.w1.mystery"] = {DType::kF32, {1}, std::vector<uint8_t>(4)};
  // as in the real checkpoint
  tensors["layers.0.ffn.shared_experts.w1.weight"].dtype = DType::kF8E4M3;
  tensors["layers.1.ffn.shared_experts.w1.weight"].dtype = DType::kF8E4M3;
  const Opened checkpoint(builder);
  int64_t ignored = 0;
  std::set<std::string> patterns;
  for (const Finding& finding : checkpoint->findings()) {
    if (finding.id == "ignored_tensor") {
      ignored += finding.count;
      patterns.insert(finding.tensor);
      EXPECT_FALSE(finding.actual.empty());
    }
  }
  // 12 tensors of each of the 8 experts in two layers are read, and one more is unknown; all the
  // rest must be listed.
  EXPECT_EQ(ignored, static_cast<int64_t>(tensors.size()) - 2 * 8 * 12 - 1);
  EXPECT_TRUE(patterns.contains("layers.*.ffn.gate.weight"));
  EXPECT_TRUE(patterns.contains("mtp.*.ffn.experts.*.w1.weight"));
  const std::set<std::string> found = ids(checkpoint->findings());
  EXPECT_TRUE(found.contains("shared_expert_not_loaded"));
  EXPECT_EQ(checkpoint->expert(0, 0).status().finding(), "unknown_expert_tensor");
  EXPECT_EQ(checkpoint->layer_options(0)->shared_intermediate_size, 0);
  EXPECT_EQ(checkpoint->shared_expert(0).status().code(), Code::kUnsupported);
}

TEST(Open, RefusesWhatItWouldComputeWrongly) {
  for (const char* part :
       {"3.up_proj.bias", "3.up_proj.pre_quant_scale", "3.up_proj.svdquant_lora_a",
        "3.up_proj.weight_zero_point", "gate_up_proj_bias"}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.tensors()[std::string("model.layers.1.mlp.experts.") + part] = {
        DType::kF32, {1}, std::vector<uint8_t>(4)};
    const Opened checkpoint(builder);
    EXPECT_THAT(checkpoint->expert(1, 0), Refused(Code::kUnsupported, part));
  }
}

TEST(Open, RefusesAFormatThatTheConfigDoesNotDeclare) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .hf_quant_config = false});
  builder.config().erase("quantization_config");
  EXPECT_THAT(refusal_of_open(builder),
              Refused(Code::kBadInput, "no config file declares a quantization"));

  CheckpointBuilder other({.model_type = "qwen3_moe", .format = SourceFormat::kCompressedTensors});
  other.config()["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}};
  EXPECT_THAT(refusal_of_open(other), AllOf(Refused(Code::kBadInput, "expected modelopt"),
                                            Refused(Code::kBadInput, "got compressed-tensors")));
}

TEST(Open, LayersAreThoseDeclaredAndPresent) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 3});
  builder.config()["mlp_only_layers"] = {2};
  builder.config()["num_hidden_layers"] = 4;
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 1}));
  const std::set<std::string> found = ids(checkpoint->findings());
  EXPECT_TRUE(found.contains("undeclared_layer"));  // layer 2: the config calls it dense
  EXPECT_TRUE(found.contains("missing_layer"));     // layer 3 is declared but missing
}

TEST(Open, ASizeThatIsNotAMultipleOf16IsMisaligned) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["moe_intermediate_size"] = 24;
  const Opened checkpoint(builder);
  EXPECT_EQ(ids(*checkpoint->validate(0, {0, 1})), (std::set<std::string>{"misaligned"}));
  EXPECT_EQ(checkpoint->expert(0, 0).status().code(), Code::kBadInput);
}

TEST(Statistics, AreThoseOfTheBytes) {
  for (const char* type : {"qwen3_moe", "llama4"}) {
    CheckpointBuilder builder({.model_type = type,
                               .format = std::string(type) == "llama4"
                                             ? SourceFormat::kModelOptStacked
                                             : SourceFormat::kModelOpt});
    const Opened checkpoint(builder);
    auto statistics = must(checkpoint->statistics(1, {2, 3}));
    uint64_t bytes = 0, count = 0, saturated = 0;
    uint8_t low = 255, high = 0;
    float scale_low = 1e30f, scale_high = 0;
    for (int64_t e = 2; e < 5; ++e) {
      for (const char* p : {"gate", "up", "down"}) {
        const BuiltMatrix& m = builder.matrix(1, e, p);
        bytes += m.codes.size();
        for (const uint8_t s : m.scales) {
          low = std::min(low, s);
          high = std::max(high, s);
          saturated += s == 0x7E;
          ++count;
        }
        scale_low = std::min(scale_low, m.tensor_scale);
        scale_high = std::max(scale_high, m.tensor_scale);
      }
    }
    EXPECT_EQ(statistics->codes_bytes, bytes);
    EXPECT_EQ(statistics->scales_bytes, count);
    EXPECT_EQ(statistics->block_scale_min, low);
    EXPECT_EQ(statistics->block_scale_max, high);
    EXPECT_EQ(statistics->tensor_scale_min, scale_low);
    EXPECT_EQ(statistics->tensor_scale_max, scale_high);
    EXPECT_DOUBLE_EQ(statistics->saturated_block_share,
                     static_cast<double>(saturated) / static_cast<double>(count));
    EXPECT_GT(saturated, 0u);
    EXPECT_FLOAT_EQ(*statistics->input_scale_min, 0.04f);
    EXPECT_FLOAT_EQ(*statistics->input_scale_max, 0.12f);
  }
}

// Producers write this for an expert that no token reached: a tensor scale of 0, or its reciprocal,
// over codes of 0.
TEST(DeadExperts, AreZerosAndReported) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
    for (const float stored : {0.0f, std::numeric_limits<float>::infinity()}) {
      for (const bool codes : {false, true}) {
        SCOPED_TRACE(std::string(to_string(format)) + " " + std::to_string(stored) +
                     (codes ? " over codes" : ""));
        CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
        for (const char* projection : {"gate", "up", "down"}) {
          auto& tensors = builder.tensors();
          std::memcpy(
              tensors.at(builder.tensor_name(1, 2, projection, "tensor_scale")).bytes.data(),
              &stored, 4);
          auto& bytes = tensors.at(builder.tensor_name(1, 2, projection, "codes")).bytes;
          std::fill(bytes.begin(), bytes.end(), uint8_t{0x80});  // -0 too is zero
          if (codes) bytes[bytes.size() - 1] = 0x01;
          auto& scales = tensors.at(builder.tensor_name(1, 2, projection, "scales")).bytes;
          std::fill(scales.begin(), scales.end(), uint8_t{0x7F});  // NaN: 0 divided by 0
        }
        const Opened checkpoint(builder);
        const std::set<std::string> found = ids(*checkpoint->validate(1, {0, 8}));
        const Result<LoadedExpert> whole = checkpoint->expert(1, 2);
        // The slice's codes are 0 either way: the whole matrix is judged.
        const Result<LoadedExpert> slice = checkpoint->expert(1, 2, {0, 16});
        EXPECT_EQ(found.contains("dead_matrix"), !codes);
        EXPECT_EQ(found.contains(stored == 0 ? "tensor_scale_zero" : "tensor_scale_nonfinite"),
                  codes);
        ASSERT_EQ(whole.ok(), !codes);
        ASSERT_EQ(slice.ok(), !codes);
        EXPECT_OK(checkpoint->expert(1, 3));
        EXPECT_OK(checkpoint->statistics(1, {0, 8}));
        if (codes) continue;
        EXPECT_EQ(whole->findings.size(), 1u);  // equal ones of a layer are merged
        for (const Nvfp4View* view :
             {&whole->source.gate, &slice->source.up, &slice->source.down}) {
          EXPECT_EQ(view->tensor_scale, 1);
          for (int64_t r = 0; r < view->rows; ++r) {
            for (int64_t c = 0; c < view->cols / 2; ++c) ASSERT_EQ(view->row_codes(r)[c], 0);
            for (int64_t c = 0; c < view->cols / 16; ++c) ASSERT_EQ(view->row_scales(r)[c], 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
