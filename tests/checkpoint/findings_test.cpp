// Each planted fault is told under its own id, by tensor, and nothing else is told; what decodes wrongly is refused.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "checkpoint/checkpoint.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using test::attacked;
using test::BuilderOptions;
using test::CheckpointBuilder;
using test::Plant;
using test::TempDir;
using testing::EndsWith;
using testing::HasSubstr;

std::set<std::string> ids(const std::vector<Finding>& findings) {
  std::set<std::string> out;
  for (const Finding& finding : findings) out.insert(finding.id);
  return out;
}

struct Expectation {
  Plant plant;
  std::set<std::string> ids;  // of validate()
  Severity severity = Severity::kError;
  const char* projection = "";  // whose tensor is named
  const char* part = "";
  bool loads = false;
};

class Planted : public testing::TestWithParam<std::tuple<Expectation, SourceFormat>> {};

ATTACK_TEST_P(kPlantedFaults, Planted, IsToldByItsOwnId) {
  const auto& [expectation, format] = GetParam();
  CheckpointBuilder builder({.model_type = "deepseek_v4", .format = format});
  builder.plant(expectation.plant, 1, 3);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);

  Result<std::vector<Finding>> clean = checkpoint->validate(0, {0, 8});
  ASSERT_OK(clean);
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
    EXPECT_EQ(loaded.status().code(), Code::kBadInput);
    EXPECT_THAT(loaded.status().message(), HasSubstr("layer 1 expert 3 "));
    EXPECT_THAT(loaded.status().message(), HasSubstr(": expected "));
    EXPECT_THAT(loaded.status().message(), HasSubstr(", got "));
    EXPECT_EQ(loaded.status().finding(), *expectation.ids.begin());
    EXPECT_THAT(loaded.status().message(), EndsWith(" [" + *expectation.ids.begin() + "]"));
  }
  EXPECT_OK(checkpoint->expert(1, 2));  // its neighbours load
}

constexpr Severity kWarn = Severity::kWarning;
const Expectation kExpectations[] = {
    {Plant::kFlippedCode, {}, Severity::kError, "", "", true},    // a legal value: only `verify --against` can tell
    {Plant::kScaleTimesTwo, {}, Severity::kError, "", "", true},  // the same
    {Plant::kSwappedGateUp, {}, Severity::kError, "", "", true},  // the same
    {Plant::kTransposedScales, {"shape_mismatch"}, Severity::kError, "down", "scales"},
    {Plant::kReciprocalTensorScale, {"reciprocal_scale_direction"}, Severity::kError, "down", "tensor_scale"},
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
    {Plant::kNegativeTensorScale, {"tensor_scale_negative"}, Severity::kError, "gate", "tensor_scale"},
    {Plant::kGateUpMismatch, {"gate_up_scale_mismatch"}, Severity::kNote, "up", "tensor_scale", true},
    {Plant::kWrongShape, {"shape_mismatch"}, Severity::kError, "up", "scales"},
    {Plant::kWrongDtype, {"dtype_mismatch"}, Severity::kError, "up", "scales"},
    {Plant::kGroupSize32, {"group_size"}, Severity::kError, "up", "scales"},
    {Plant::kZeroScaleOverCodes, {"zero_scale_nonzero_codes"}, kWarn, "down", "codes", true},
    {Plant::kAllZeroScales, {"all_zero_block_scales"}, Severity::kError, "down", "scales"},
};
INSTANTIATE_TEST_SUITE_P(All, Planted,
                         testing::Combine(testing::ValuesIn(kExpectations),
                                          testing::Values(SourceFormat::kModelOpt, SourceFormat::kCompressedTensors)),
                         [](const auto& param) {
                           const bool modelopt = std::get<1>(param.param) == SourceFormat::kModelOpt;
                           return std::string(to_string(std::get<0>(param.param).plant)) +
                                  (modelopt ? "_modelopt" : "_compressed_tensors");
                         });

TEST(Findings, ShiftedExpertsRefuseTheWholeLayer) {
  CheckpointBuilder builder({.model_type = "deepseek_v4"});
  builder.plant(Plant::kShiftedExperts, 1, 0);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(ids(*checkpoint->validate(1, {0, 8})), (std::set<std::string>{"missing_expert", "unexpected_expert"}));
  // Expert 1 exists, but is it expert 1?
  const Status status = checkpoint->expert(1, 1).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_THAT(status.message(),
              HasSubstr("layer 1 expert 8 layers.1.ffn.experts.8.w1.weight: expected experts 0 to 7"));
  EXPECT_OK(checkpoint->expert(0, 1));
}

TEST(Findings, CodesUnderAZeroScaleAreZeroAfterLoading) {
  for (const IntermediateSlice slice : {IntermediateSlice{}, {0, 16}}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.plant(Plant::kZeroScaleOverCodes, 0, 0);  // down, scale 2: row 1, block 0
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    Result<LoadedExpert> loaded = checkpoint->expert(0, 0, slice);
    ASSERT_OK(loaded);
    ASSERT_EQ(loaded->findings.size(), 1u);
    EXPECT_EQ(loaded->findings[0].id, "zero_scale_nonzero_codes");
    EXPECT_EQ(loaded->findings[0].count, 1);
    EXPECT_FALSE(loaded->storage.empty());
    const Nvfp4View& down = loaded->source.down;
    const std::vector<uint8_t>& before = builder.matrix(0, 0, "down").codes;
    for (int64_t r = 0; r < down.rows; ++r) {
      for (int64_t i = 0; i < down.cols / 2; ++i) {
        const bool cleared = r == 1 && i < 8;
        EXPECT_EQ(down.row_codes(r)[i], cleared ? 0 : before[static_cast<size_t>(r * 16 + i)]) << r << " " << i;
      }
    }
    EXPECT_EQ(loaded->source.gate.codes_stride, 32);
  }
}

TEST(Findings, LikeOnesFoldPerLayer) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t e : {1, 4, 6}) builder.plant(Plant::kGateUpMismatch, 0, e);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  Result<std::vector<Finding>> findings = checkpoint->validate(0, {0, 8});
  ASSERT_OK(findings);
  ASSERT_EQ(findings->size(), 1u);
  EXPECT_EQ(findings->front().expert, 1);
  EXPECT_EQ(findings->front().count, 3);
  EXPECT_THAT(to_string(findings->front()), HasSubstr("note gate_up_scale_mismatch: layer 0 expert 1 model.layers.0"));
  EXPECT_THAT(to_string(findings->front()),
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
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    std::vector<Finding> findings;
    Result<LayerScales> scales = checkpoint->layer_scales(0, &findings);
    ASSERT_OK(scales);
    EXPECT_FLOAT_EQ(*scales->hidden, 0.09f);        // 0.01 * (7 + 2)
    EXPECT_FLOAT_EQ(*scales->intermediate, 0.14f);  // 0.02 * (5 + 2): 7 has none, 6 an infinite one
    EXPECT_EQ(ids(findings), (std::set<std::string>{"input_scale_missing", "input_scale_infinite"}));
  }
}

TEST(LayerScales, NoneUsableIsNulloptAndTold) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (int64_t e = 0; e < 8; ++e) builder.plant(Plant::kZeroInputScale, 0, e);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  std::vector<Finding> findings;
  Result<LayerScales> scales = checkpoint->layer_scales(0, &findings);
  ASSERT_OK(scales);
  EXPECT_TRUE(scales->hidden.has_value());
  EXPECT_FALSE(scales->intermediate.has_value());
  EXPECT_EQ(ids(findings), (std::set<std::string>{"input_scale_zero", "input_scale_unusable"}));
  EXPECT_EQ(findings[0].count, 8);
}

TEST(LayerScales, WeightOnlyCheckpointsHaveNone) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .weight_only = true});
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
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
      test::BuiltMatrix& m = cast.matrix(0, e, p);
      for (uint8_t& scale : m.scales) scale &= 0x78;
      m.tensor_scale = 0x1p-12f;
      for (uint8_t& scale : four_six.matrix(0, e, p).scales) scale = std::min<uint8_t>(scale, 0x7C);
    }
  }
  const auto layer_ids = [](CheckpointBuilder& builder) {
    TempDir dir;
    EXPECT_OK(builder.write(dir.path().string()));
    Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    EXPECT_OK(checkpoint);
    return ids(*checkpoint->validate(0, {0, 8}));
  };
  EXPECT_EQ(layer_ids(cast), (std::set<std::string>{"power_of_two_scales"}));
  EXPECT_EQ(layer_ids(four_six), (std::set<std::string>{"four_over_six_scales"}));
}

TEST(Findings, Mxfp4BlocksOutOfReachAreCountedAndNanScalesRefused) {
  CheckpointBuilder builder({.model_type = "deepseek_v4", .format = SourceFormat::kMxfp4});
  builder.matrix(0, 2, "up").scales[4] = 100;  // the others are 117 to 122: 22 below the largest
  builder.matrix(0, 2, "up").codes[4 * 16] = 0x77;
  builder.matrix(1, 5, "down").scales[0] = 255;
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
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
  tensors["layers.0.ffn.shared_experts.w1.weight"].dtype = DType::kF8E4M3;  // as the real one has it
  tensors["layers.1.ffn.shared_experts.w1.weight"].dtype = DType::kF8E4M3;
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  int64_t ignored = 0;
  std::set<std::string> patterns;
  for (const Finding& finding : checkpoint->findings()) {
    if (finding.id == "ignored_tensor") {
      ignored += finding.count;
      patterns.insert(finding.tensor);
      EXPECT_FALSE(finding.actual.empty());
    }
  }
  // Two layers of 8 experts with 12 tensors are read, one more is unknown; all the rest must be listed.
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
  const auto open_with = [](const std::string& name) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.tensors()[name] = {DType::kF32, {1}, std::vector<uint8_t>(4)};
    TempDir dir;
    EXPECT_OK(builder.write(dir.path().string()));
    return Checkpoint::open(dir.path().string());
  };
  for (const char* part : {"3.up_proj.bias", "3.up_proj.pre_quant_scale", "3.up_proj.svdquant_lora_a",
                           "3.up_proj.weight_zero_point", "gate_up_proj_bias"}) {
    const Result<Checkpoint> checkpoint = open_with(std::string("model.layers.1.mlp.experts.") + part);
    const Status refused = checkpoint->expert(1, 0).status();
    EXPECT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_THAT(refused.message(), HasSubstr(part));
  }
  // Two names for one thing.
  EXPECT_EQ(open_with("model.layers.1.mlp.experts.3.w1.weight").status().code(), Code::kBadInput);
  EXPECT_EQ(open_with("layers.1.mlp.experts.3.up_proj.weight").status().code(), Code::kBadInput);
}

TEST(Open, RefusesAFormatThatTheConfigDoesNotDeclare) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .hf_quant_config = false});
  TempDir dir;
  builder.config().erase("quantization_config");
  ASSERT_OK(builder.write(dir.path().string()));
  const Status none = Checkpoint::open(dir.path().string()).status();
  EXPECT_EQ(none.code(), Code::kBadInput);
  EXPECT_THAT(none.message(), HasSubstr("no config file declares a quantization"));

  CheckpointBuilder other({.model_type = "qwen3_moe", .format = SourceFormat::kCompressedTensors});
  other.config()["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}};
  TempDir other_dir;
  ASSERT_OK(other.write(other_dir.path().string()));
  const Status wrong = Checkpoint::open(other_dir.path().string()).status();
  EXPECT_EQ(wrong.code(), Code::kBadInput);
  EXPECT_THAT(wrong.message(), HasSubstr("expected modelopt"));
  EXPECT_THAT(wrong.message(), HasSubstr("got compressed-tensors"));
}

TEST(Open, LayersAreThoseDeclaredAndPresent) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 3});
  builder.config()["mlp_only_layers"] = {2};
  builder.config()["num_hidden_layers"] = 4;
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 1}));
  const std::set<std::string> found = ids(checkpoint->findings());
  EXPECT_TRUE(found.contains("undeclared_layer"));  // 2 has experts, the config calls it dense
  EXPECT_TRUE(found.contains("missing_layer"));     // 3 is declared and not there
}

TEST(Open, ASizeThatIsNotAMultipleOf16IsMisaligned) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["moe_intermediate_size"] = 24;
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(ids(*checkpoint->validate(0, {0, 1})), (std::set<std::string>{"misaligned"}));
  EXPECT_EQ(checkpoint->expert(0, 0).status().code(), Code::kBadInput);
}

TEST(Statistics, AreThoseOfTheBytes) {
  for (const char* type : {"qwen3_moe", "llama4"}) {
    CheckpointBuilder builder(
        {.model_type = type,
         .format = std::string(type) == "llama4" ? SourceFormat::kModelOptStacked : SourceFormat::kModelOpt});
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    Result<LayerStatistics> statistics = checkpoint->statistics(1, {2, 3});
    ASSERT_OK(statistics);
    uint64_t bytes = 0, count = 0, saturated = 0;
    uint8_t low = 255, high = 0;
    float scale_low = 1e30f, scale_high = 0;
    for (int64_t e = 2; e < 5; ++e) {
      for (const char* p : {"gate", "up", "down"}) {
        const test::BuiltMatrix& m = builder.matrix(1, e, p);
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
    EXPECT_DOUBLE_EQ(statistics->saturated_block_share, static_cast<double>(saturated) / static_cast<double>(count));
    EXPECT_GT(saturated, 0u);
    EXPECT_FLOAT_EQ(*statistics->input_scale_min, 0.04f);
    EXPECT_FLOAT_EQ(*statistics->input_scale_max, 0.12f);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
