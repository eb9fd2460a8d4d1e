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

using Ids = std::set<std::string>;
constexpr Severity kError = Severity::kError, kWarn = Severity::kWarning, kNote = Severity::kNote;
constexpr SourceFormat kNvfp4Formats[] = {SourceFormat::kModelOpt,
                                          SourceFormat::kCompressedTensors};

struct Expectation {
  Plant plant;
  const char* id = "";  // of validate()
  Severity severity = kError;
  const char *projection = "", *part = "";  // of the tensor that is named
};
const Expectation kExpectations[] = {
    // Legal values: only `verify --against` detects them.
    {Plant::kFlippedCode},
    {Plant::kScaleTimesTwo},
    {Plant::kSwappedGateUp},
    {Plant::kTransposedScales, "shape_mismatch", kError, "down", "scales"},
    {Plant::kReciprocalTensorScale, "reciprocal_scale_direction", kError, "down", "tensor_scale"},
    {Plant::kMissingExpert, "missing_expert", kError, "gate", "codes"},
    {Plant::kMissingInputScale, "input_scale_missing", kWarn, "down", "input_scale"},
    {Plant::kZeroInputScale, "input_scale_zero", kWarn, "down", "input_scale"},
    {Plant::kDenormalInputScale, "input_scale_denormal", kWarn, "down", "input_scale"},
    {Plant::kInfiniteInputScale, "input_scale_infinite", kWarn, "down", "input_scale"},
    {Plant::kNanInputScale, "input_scale_nan", kWarn, "down", "input_scale"},
    {Plant::kNegativeInputScale, "input_scale_negative", kWarn, "down", "input_scale"},
    {Plant::kOneInputScale, "input_scale_one", kNote, "down", "input_scale"},
    {Plant::kNanBlockScale, "block_scale_nan", kError, "up", "scales"},
    {Plant::kNegativeBlockScale, "block_scale_negative", kError, "up", "scales"},
    {Plant::kNanTensorScale, "tensor_scale_nonfinite", kError, "gate", "tensor_scale"},
    {Plant::kZeroTensorScale, "tensor_scale_zero", kError, "gate", "tensor_scale"},
    {Plant::kNegativeTensorScale, "tensor_scale_negative", kError, "gate", "tensor_scale"},
    {Plant::kGateUpMismatch, "gate_up_scale_mismatch", kNote, "up", "tensor_scale"},
    {Plant::kWrongShape, "shape_mismatch", kError, "up", "scales"},
    {Plant::kWrongDtype, "dtype_mismatch", kError, "up", "scales"},
    {Plant::kGroupSize32, "group_size", kError, "up", "scales"},
    {Plant::kZeroScaleOverCodes, "zero_scale_nonzero_codes", kWarn, "down", "codes"},
    {Plant::kAllZeroScales, "all_zero_block_scales", kError, "down", "scales"},
};

class Planted : public testing::TestWithParam<std::tuple<Expectation, SourceFormat>> {};

ATTACK_TEST_P(kPlantedFaults, Planted, IsToldByItsOwnId) {
  const auto& [expectation, format] = GetParam();
  CheckpointBuilder builder({.model_type = "deepseek_v4", .format = format});
  builder.plant(expectation.plant, 1, 3);
  const Opened checkpoint(builder);
  EXPECT_THAT(*checkpoint->validate(0, {0, 8}), IsEmpty());
  const std::string id = expectation.id;
  const auto findings = must(checkpoint->validate(1, {0, 8}));
  attacked();
  EXPECT_EQ(ids(*findings), id.empty() ? Ids{} : Ids{id});
  for (const Finding& finding : *findings) {
    EXPECT_EQ(finding.severity, expectation.severity) << to_string(finding);
    EXPECT_EQ(finding.layer, 1);
    EXPECT_EQ(finding.expert, 3);
    EXPECT_EQ(finding.tensor, builder.tensor_name(1, 3, expectation.projection, expectation.part));
    EXPECT_FALSE(finding.expected.empty());
    EXPECT_FALSE(finding.actual.empty());
  }
  const Result<LoadedExpert> loaded = checkpoint->expert(1, 3);
  EXPECT_EQ(loaded.ok(), id.empty() || expectation.severity != kError);
  if (!loaded.ok()) {
    EXPECT_THAT(loaded, Refused(Code::kBadInput, "layer 1 expert 3 "));
    EXPECT_THAT(loaded.status().message(), HasSubstr(": expected "));
    EXPECT_THAT(loaded.status().message(), HasSubstr(", got "));
    EXPECT_THAT(loaded.status().message(), EndsWith(" [" + id + "]"));
    EXPECT_EQ(loaded.status().finding(), id);
  }
  EXPECT_OK(checkpoint->expert(1, 2));  // its neighbours load
}

INSTANTIATE_TEST_SUITE_P(All, Planted,
                         testing::Combine(testing::ValuesIn(kExpectations),
                                          testing::ValuesIn(kNvfp4Formats)),
                         [](const auto& param) {
                           return std::string(to_string(std::get<0>(param.param).plant)) +
                                  (std::get<1>(param.param) == SourceFormat::kModelOpt
                                       ? "_modelopt"
                                       : "_compressed_tensors");
                         });

TEST(Findings, ShiftedExpertsRefuseTheWholeLayer) {
  CheckpointBuilder builder({.model_type = "deepseek_v4"});
  builder.plant(Plant::kShiftedExperts, 1, 0);
  const Opened checkpoint(builder);
  EXPECT_EQ(ids(*checkpoint->validate(1, {0, 8})), (Ids{"missing_expert", "unexpected_expert"}));
  // Expert 1 exists, but since there is an expert 8 its number may be wrong.
  EXPECT_THAT(
      checkpoint->expert(1, 1),
      Refused(Code::kBadInput,
              "layer 1 expert 8 layers.1.ffn.experts.8.w1.weight: expected experts 0 to 7"));
  EXPECT_OK(checkpoint->expert(0, 1));
}

TEST(Findings, CodesUnderAZeroScaleAreZeroAfterLoading) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.plant(Plant::kZeroScaleOverCodes, 0, 0);  // down, scale 2: row 1, block 0
  const std::vector<uint8_t> before = builder.matrix(0, 0, "down").codes;
  std::fill_n(builder.matrix(0, 0, "down").codes.begin() + 16, 8,
              uint8_t{0x70});  // not the lower code of a byte
  const Opened checkpoint(builder);
  for (const IntermediateSlice slice : {IntermediateSlice{}, {0, 16}}) {
    const auto loaded = must(checkpoint->expert(0, 0, slice));
    ASSERT_EQ(ids(loaded->findings), Ids{"zero_scale_nonzero_codes"});
    EXPECT_EQ(loaded->findings[0].count, 1);
    const Nvfp4View& down = loaded->source.down;
    std::vector<uint8_t> expected = cut(before, 16, 0, down.rows, 0, down.cols / 2);
    std::fill_n(expected.begin() + down.cols / 2, 8, uint8_t{0});
    EXPECT_EQ(codes_of(down), expected);
  }
}

TEST(Findings, LikeOnesFoldPerLayer) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t e : {1, 4, 6}) builder.plant(Plant::kGateUpMismatch, 0, e);
  const Opened checkpoint(builder);
  const auto findings = must(checkpoint->validate(0, {0, 8}));
  ASSERT_EQ(findings->size(), 1u);
  EXPECT_EQ(findings->front().expert, 1);
  EXPECT_EQ(findings->front().count, 3);
  EXPECT_EQ(findings->front().examples.size(), 2u);
  const std::string text = to_string(findings->front());
  EXPECT_THAT(text, StartsWith("note gate_up_scale_mismatch: layer 0 expert 1 model.layers.0"));
  EXPECT_THAT(
      text,
      HasSubstr("(and 2 more, such as model.layers.0.mlp.experts.4.up_proj.weight_scale_2, "));
  EXPECT_EQ(checkpoint->validate(0, {5, 3})->front().count, 1);  // only the range
  EXPECT_EQ(checkpoint->statistics(0, {0, 8})->gate_up_mismatches, 3);
  EXPECT_EQ(checkpoint->validate(0, {5, 4}).status().code(), Code::kInvalidArgument);
}

TEST(LayerScales, TakeTheLargestUsableOfAllExperts) {
  for (const SourceFormat format : kNvfp4Formats) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
    builder.plant(Plant::kMissingInputScale, 0, 7);  // the builder's largest is the last expert's
    builder.plant(Plant::kInfiniteInputScale, 0, 6);
    for (int64_t e = 0; e < 8; ++e) builder.plant(Plant::kZeroInputScale, 1, e);
    const Opened checkpoint(builder);
    std::vector<Finding> findings;
    auto scales = must(checkpoint->layer_scales(0, &findings));
    EXPECT_FLOAT_EQ(*scales->hidden, 0.09f);        // 0.01 * (7 + 2)
    EXPECT_FLOAT_EQ(*scales->intermediate, 0.14f);  // 0.02 * (5 + 2): 7 has no scale, 6 an Inf
    EXPECT_EQ(ids(findings), (Ids{"input_scale_missing", "input_scale_infinite"}));
    findings.clear();
    scales = checkpoint->layer_scales(1, &findings);
    EXPECT_TRUE(scales->hidden.has_value());
    EXPECT_FALSE(scales->intermediate.has_value());
    EXPECT_EQ(ids(findings), (Ids{"input_scale_zero", "input_scale_unusable"}));
    EXPECT_EQ(findings[0].count, 8);
  }
  const Opened weight_only(CheckpointBuilder({.model_type = "qwen3_moe", .weight_only = true}));
  EXPECT_EQ(weight_only->model().options.activation_format, ActivationFormat::kBf16);
  std::vector<Finding> findings;
  EXPECT_FALSE(weight_only->layer_scales(0, &findings)->hidden.has_value());
  EXPECT_THAT(findings, IsEmpty());
  EXPECT_THAT(*weight_only->validate(0, {0, 8}), IsEmpty());
}

TEST(Findings, LosslessMxfp4CastsAndFourOverSixAreNoted) {
  CheckpointBuilder cast({.model_type = "qwen3_moe"}), four_six = cast;
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
  ASSERT_EQ(ids(findings), Ids{"mxfp4_block_rounded"});
  EXPECT_EQ(findings[0].count, 2);  // two 16-blocks
  EXPECT_EQ(checkpoint->expert(0, 2)->findings.at(0).id, "mxfp4_block_rounded");
  EXPECT_EQ(ids(*checkpoint->validate(1, {0, 8})), Ids{"block_scale_nan"});
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
  Ids patterns;
  for (const Finding& finding : checkpoint->findings()) {
    if (finding.id != "ignored_tensor") continue;
    ignored += finding.count;
    patterns.insert(finding.tensor);
    EXPECT_FALSE(finding.actual.empty());
  }
  // 12 tensors of each of the 8 experts in two layers are read, and one more is unknown; all the
  // rest must be listed.
  EXPECT_EQ(ignored, static_cast<int64_t>(tensors.size()) - 2 * 8 * 12 - 1);
  EXPECT_TRUE(patterns.contains("layers.*.ffn.gate.weight"));
  EXPECT_TRUE(patterns.contains("mtp.*.ffn.experts.*.w1.weight"));
  EXPECT_NE(find(checkpoint->findings(), "shared_expert_not_loaded"), nullptr);
  EXPECT_EQ(checkpoint->expert(0, 0).status().finding(), "unknown_expert_tensor");
  EXPECT_EQ(checkpoint->layer_options(0)->shared_intermediate_size, 0);
  EXPECT_EQ(checkpoint->shared_expert(0).status().code(), Code::kUnsupported);
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
  builder.config().update({{"mlp_only_layers", {2}}, {"num_hidden_layers", 4}});
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 1}));
  EXPECT_NE(find(checkpoint->findings(), "undeclared_layer"), nullptr);  // 2: dense by the config
  EXPECT_NE(find(checkpoint->findings(), "missing_layer"), nullptr);     // 3
}

TEST(Open, ASizeThatIsNotAMultipleOf16IsMisaligned) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["moe_intermediate_size"] = 24;
  const Opened checkpoint(builder);
  EXPECT_EQ(ids(*checkpoint->validate(0, {0, 1})), Ids{"misaligned"});
  EXPECT_EQ(checkpoint->expert(0, 0).status().code(), Code::kBadInput);
}

TEST(Statistics, AreThoseOfTheBytes) {
  for (const char* type : {"qwen3_moe", "llama4"}) {
    CheckpointBuilder builder({.model_type = type,
                               .format = std::string(type) == "llama4"
                                             ? SourceFormat::kModelOptStacked
                                             : SourceFormat::kModelOpt});
    const Opened checkpoint(builder);
    const auto statistics = must(checkpoint->statistics(1, {2, 3}));
    uint64_t codes = 0;
    std::vector<uint8_t> scales;
    std::vector<float> tensor_scales;
    for (int64_t e = 2; e < 5; ++e) {
      for (const char* p : {"gate", "up", "down"}) {
        const BuiltMatrix& m = builder.matrix(1, e, p);
        codes += m.codes.size();
        scales.insert(scales.end(), m.scales.begin(), m.scales.end());
        tensor_scales.push_back(m.tensor_scale);
      }
    }
    const auto saturated = std::count(scales.begin(), scales.end(), uint8_t{0x7E});
    EXPECT_EQ(statistics->codes_bytes, codes);
    EXPECT_EQ(statistics->scales_bytes, scales.size());
    EXPECT_EQ(statistics->block_scale_min, std::ranges::min(scales));
    EXPECT_EQ(statistics->block_scale_max, std::ranges::max(scales));
    EXPECT_EQ(statistics->tensor_scale_min, std::ranges::min(tensor_scales));
    EXPECT_EQ(statistics->tensor_scale_max, std::ranges::max(tensor_scales));
    EXPECT_DOUBLE_EQ(statistics->saturated_block_share,
                     static_cast<double>(saturated) / static_cast<double>(scales.size()));
    EXPECT_GT(saturated, 0);
    EXPECT_FLOAT_EQ(*statistics->input_scale_min, 0.04f);
    EXPECT_FLOAT_EQ(*statistics->input_scale_max, 0.12f);
  }
}

// Producers write this for an expert that no token reached: a tensor scale of 0, or its reciprocal,
// over codes of 0.
TEST(DeadExperts, AreZerosAndReported) {
  for (const SourceFormat format : kNvfp4Formats) {
    for (const float stored : {0.0f, std::numeric_limits<float>::infinity()}) {
      for (const bool codes : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << to_string(format) << " " << stored << (codes ? " over codes" : ""));
        CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
        for (const char* projection : {"gate", "up", "down"}) {
          const auto bytes = [&](const char* part) -> std::vector<uint8_t>& {
            return builder.tensors().at(builder.tensor_name(1, 2, projection, part)).bytes;
          };
          std::memcpy(bytes("tensor_scale").data(), &stored, 4);
          std::ranges::fill(bytes("codes"), uint8_t{0x80});  // -0 too is zero
          if (codes) bytes("codes").back() = 0x01;
          std::ranges::fill(bytes("scales"), uint8_t{0x7F});  // NaN: 0 divided by 0
        }
        const Opened checkpoint(builder);
        const Ids found = ids(*checkpoint->validate(1, {0, 8}));
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
          EXPECT_THAT(codes_of(*view), Each(0));
          EXPECT_THAT(scales_of(*view), Each(0));
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
