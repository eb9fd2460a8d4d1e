// Every family in every format loads to exactly what was written, whole and in slices.
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/experts.h"
#include "support/spec_oracle.h"

namespace nvfp4_moe::internal::test {
namespace {

double decode(const Nvfp4View& view, int64_t r, int64_t c) {
  const uint8_t byte = view.row_codes(r)[c / 2];
  return oracle_e2m1(c % 2 == 0 ? byte & 15 : byte >> 4) * oracle_e4m3(view.row_scales(r)[c / 16]) *
         static_cast<double>(view.tensor_scale);
}

void expect_matrix(const Nvfp4View& view, const BuiltMatrix& built, SourceFormat format) {
  ASSERT_EQ(view.rows, built.rows);
  ASSERT_EQ(view.cols, built.cols);
  EXPECT_EQ(codes_of(view), built.codes);
  if (format == SourceFormat::kMxfp4) {
    for (int64_t r = 0; r < view.rows; ++r) {
      for (int64_t c = 0; c < view.cols; ++c) {
        const uint8_t byte = built.codes[static_cast<size_t>(r * view.cols / 2 + c / 2)];
        const int k = built.scales[static_cast<size_t>(r * view.cols / 32 + c / 32)] - 127;
        ASSERT_EQ(decode(view, r, c),
                  std::ldexp(oracle_e2m1(c % 2 == 0 ? byte & 15 : byte >> 4), k));
      }
    }
    return;
  }
  // Floats are quantized as by the builder, each matrix with its own amax.
  EXPECT_EQ(scales_of(view), built.scales);
  const auto reciprocal = [](float x) { return static_cast<float>(1.0 / static_cast<double>(x)); };
  EXPECT_EQ(view.tensor_scale, format == SourceFormat::kCompressedTensors
                                   ? reciprocal(reciprocal(built.tensor_scale))
                                   : built.tensor_scale);
}

struct Case {
  const char* model_type;
  SourceFormat format;
  bool stacked_floats = false;
  DType dtype = DType::kBf16;
};

class Load : public testing::TestWithParam<Case> {};

TEST_P(Load, EveryExpertIsWhatWasWritten) {
  const Case& param = GetParam();
  CheckpointBuilder builder({.model_type = param.model_type,
                             .format = param.format,
                             .stacked_floats = param.stacked_floats,
                             .float_dtype = param.dtype,
                             .num_experts = 4,
                             .shards = 3});
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().format, param.format);
  EXPECT_EQ(checkpoint->model().layers, builder.layers());
  EXPECT_EQ(checkpoint->model().options.num_experts, 4);
  EXPECT_EQ(checkpoint->model().options.hidden_size, 64);
  EXPECT_EQ(checkpoint->model().options.intermediate_size, 32);
  for (const Finding& finding : checkpoint->findings())
    EXPECT_NE(finding.severity, Severity::kError) << to_string(finding);
  for (const int64_t layer : builder.layers()) {
    for (int64_t e = 0; e < 4; ++e) {
      SCOPED_TRACE(testing::Message() << "layer " << layer << " expert " << e);
      const auto loaded = must(checkpoint->expert(layer, e));
      EXPECT_THAT(loaded->findings, IsEmpty());
      expect_matrix(loaded->source.gate, builder.matrix(layer, e, "gate"), param.format);
      expect_matrix(loaded->source.up, builder.matrix(layer, e, "up"), param.format);
      expect_matrix(loaded->source.down, builder.matrix(layer, e, "down"), param.format);
      EXPECT_EQ(checkpoint->tensor_name(layer, e, "down"),
                builder.tensor_name(layer, e, "down", "codes"));
    }
    const auto findings = must(checkpoint->validate(layer, {0, 4}));
    for (const Finding& finding : *findings)
      EXPECT_EQ(finding.severity, Severity::kNote) << to_string(finding);
    // With stacked NVFP4 experts the builder leaves the shared expert in floats. The host has to
    // add such a shared expert itself.
    const bool shared = builder.has_shared() && param.format != SourceFormat::kModelOptStacked;
    EXPECT_EQ(checkpoint->layer_options(layer)->shared_intermediate_size, shared ? 32 : 0);
    if (shared)
      expect_matrix(must(checkpoint->shared_expert(layer))->source.down,
                    builder.matrix(layer, -1, "down"), param.format);
    else
      EXPECT_EQ(checkpoint->shared_expert(layer).status().code(), Code::kUnsupported);
  }
  EXPECT_EQ(checkpoint->expert(1, 4).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(checkpoint->expert(1, -1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(checkpoint->expert(3, 0).status().code(), Code::kInvalidArgument);
}

TEST_P(Load, SlicesAreThePartsOfTheWhole) {
  const Case& param = GetParam();
  CheckpointBuilder builder({.model_type = param.model_type,
                             .format = param.format,
                             .stacked_floats = param.stacked_floats,
                             .float_dtype = param.dtype,
                             .num_experts = 2,
                             .intermediate_size = 96});
  const Opened checkpoint(builder);
  const int64_t layer = builder.layers().front();
  const auto whole = must(checkpoint->expert(layer, 1));
  for (const IntermediateSlice slice : {IntermediateSlice{0, 32}, {16, 48}, {80, 16}, {48, 48}}) {
    SCOPED_TRACE(testing::Message() << slice.first << " + " << slice.count);
    const auto part = must(checkpoint->expert(layer, 1, slice));
    const auto expect_part = [&](const Nvfp4View& ours, const Nvfp4View& all, int64_t row,
                                 int64_t col) {
      for (int64_t r = 0; r < ours.rows; ++r)
        for (int64_t c = 0; c < ours.cols; ++c)
          ASSERT_EQ(decode(ours, r, c), decode(all, row + r, col + c)) << r << " " << c;
      if (param.format == SourceFormat::kMxfp4) return;  // its scales depend on the largest one
      EXPECT_EQ(ours.tensor_scale, all.tensor_scale);
      EXPECT_EQ(scales_of(ours), cut(scales_of(all), all.cols / 16, row, row + ours.rows, col / 16,
                                     (col + ours.cols) / 16));
    };
    EXPECT_EQ(part->source.gate.rows, slice.count);
    EXPECT_EQ(part->source.up.rows, slice.count);
    EXPECT_EQ(part->source.down.cols, slice.count);
    EXPECT_EQ(part->source.down.rows, 64);
    expect_part(part->source.gate, whole->source.gate, slice.first, 0);
    expect_part(part->source.up, whole->source.up, slice.first, 0);
    expect_part(part->source.down, whole->source.down, 0, slice.first);
  }
  for (const IntermediateSlice bad :
       {IntermediateSlice{8, 16}, {0, 24}, {-16, 16}, {96, 16}, {80, 32}})
    EXPECT_EQ(checkpoint->expert(layer, 1, bad).status().code(), Code::kInvalidArgument)
        << bad.first;
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const char* type :
       {"deepseek_v3", "deepseek_v4", "kimi_k2", "kimi_k25", "qwen2_moe", "qwen3_moe", "qwen3_next",
        "qwen3_5_moe", "glm4_moe", "glm5_next", "minimax_m2", "minimax_m3", "mixtral"})
    for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors,
                                      SourceFormat::kMxfp4, SourceFormat::kFloat})
      out.push_back({type, format});
  for (const char* type : {"llama4", "motif", "qwen3_5_moe"})  // llama4: K is axis 1
    out.push_back({type, SourceFormat::kModelOptStacked});
  out.push_back({"llama4", SourceFormat::kFloat, true});
  out.push_back({"qwen3_5_moe", SourceFormat::kFloat, true});
  out.push_back({"qwen3_moe", SourceFormat::kFloat, true, DType::kF16});
  out.push_back({"qwen3_moe", SourceFormat::kFloat, false, DType::kF16});
  out.push_back({"qwen3_moe", SourceFormat::kFloat, false, DType::kF32});
  return out;
}
INSTANTIATE_TEST_SUITE_P(All, Load, testing::ValuesIn(cases()), [](const auto& info) {
  const Case& param = info.param;
  std::string name = std::string(param.model_type) + "_" + to_string(param.format);
  if (param.format == SourceFormat::kFloat) name += std::string("_") + to_string(param.dtype);
  if (param.stacked_floats) name += "_stacked";
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(LoadFloat, ANonFiniteWeightIsNamed) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .format = SourceFormat::kFloat});
  builder.matrix(0, 2, "up").weights[64 * 5 + 7] = std::numeric_limits<float>::infinity();
  const Opened checkpoint(builder);
  EXPECT_THAT(checkpoint->expert(0, 2),
              Refused(Code::kBadInput,
                      "layer 0 expert 2: model.layers.0.mlp.experts.2.up_proj.weight: (5, 7): "
                      "expected a finite weight, got inf"));
}

TEST(LoadScalars, BothShapesOfAScalarAreRead) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}}) {
    for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
      CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
      for (auto& [name, tensor] : builder.tensors())
        if (tensor.dtype == DType::kF32) tensor.shape = shape;
      const Opened checkpoint(builder);
      ASSERT_OK(checkpoint->expert(1, 7));
      EXPECT_TRUE(checkpoint->layer_scales(1)->hidden.has_value());
    }
  }
}

TEST(Open, ASingleFileFindsItsConfig) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const auto checkpoint = must(Checkpoint::open(dir.file("model.safetensors")));
  EXPECT_OK(checkpoint->expert(1, 7));
  std::filesystem::remove(dir.file("config.json"));
  EXPECT_THAT(Checkpoint::open(dir.path().string()), Refused(Code::kIo, "config.json"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
