// Every family in every format loads to exactly what was written, whole and in slices.
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/experts.h"
#include "core/quantize.h"
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
  switch (format) {
    case SourceFormat::kModelOpt:
    case SourceFormat::kModelOptStacked:
      EXPECT_EQ(view.tensor_scale, built.tensor_scale);
      EXPECT_EQ(codes_of(view), built.codes);
      EXPECT_EQ(scales_of(view), built.scales);
      break;
    case SourceFormat::kCompressedTensors: {
      const float stored = static_cast<float>(1.0 / static_cast<double>(built.tensor_scale));
      EXPECT_EQ(view.tensor_scale, static_cast<float>(1.0 / static_cast<double>(stored)));
      EXPECT_EQ(codes_of(view), built.codes);
      EXPECT_EQ(scales_of(view), built.scales);
      break;
    }
    case SourceFormat::kMxfp4:
      EXPECT_EQ(codes_of(view), built.codes);
      for (int64_t r = 0; r < view.rows; ++r) {
        for (int64_t c = 0; c < view.cols; ++c) {
          const uint8_t byte = built.codes[static_cast<size_t>(r * view.cols / 2 + c / 2)];
          const int k = built.scales[static_cast<size_t>(r * view.cols / 32 + c / 32)] - 127;
          ASSERT_EQ(decode(view, r, c),
                    std::ldexp(oracle_e2m1(c % 2 == 0 ? byte & 15 : byte >> 4), k));
        }
      }
      break;
    case SourceFormat::kFloat: {
      double amax = 0;
      for (const float w : built.weights) amax = std::max(amax, std::abs(static_cast<double>(w)));
      EXPECT_EQ(view.tensor_scale, static_cast<float>(amax / 2688));
      // No value is rounded by more than half the widest step of E2M1 (1, between 4 and 6) in units
      // of its block's scale. The scale itself is rounded by at most 1/16. Both together stay below
      // amax of the block / 6 * 1.2.
      for (int64_t r = 0; r < view.rows; ++r) {
        for (int64_t b = 0; b < view.cols / 16; ++b) {
          double block = 0;
          for (int64_t i = 0; i < 16; ++i) {
            block = std::max(
                block, std::abs(static_cast<double>(built.weights[r * view.cols + b * 16 + i])));
          }
          for (int64_t i = 0; i < 16; ++i) {
            const double w = static_cast<double>(built.weights[r * view.cols + b * 16 + i]);
            ASSERT_LE(std::abs(decode(view, r, b * 16 + i) - w), block / 6 * 1.2);
          }
        }
      }
      break;
    }
  }
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
  BuilderOptions options{.model_type = param.model_type,
                         .format = param.format,
                         .stacked_floats = param.stacked_floats,
                         .float_dtype = param.dtype,
                         .num_experts = 4,
                         .shards = 3};
  CheckpointBuilder builder(options);
  const Opened opened(builder);
  const Checkpoint& checkpoint = *opened;
  EXPECT_EQ(checkpoint.model().format, param.format);
  EXPECT_EQ(checkpoint.model().layers, builder.layers());
  EXPECT_EQ(checkpoint.model().options.num_experts, 4);
  EXPECT_EQ(checkpoint.model().options.hidden_size, 64);
  EXPECT_EQ(checkpoint.model().options.intermediate_size, 32);
  for (const Finding& finding : checkpoint.findings()) {
    EXPECT_NE(finding.severity, Severity::kError) << to_string(finding);
  }
  for (const int64_t layer : builder.layers()) {
    for (int64_t e = 0; e < 4; ++e) {
      SCOPED_TRACE(testing::Message() << "layer " << layer << " expert " << e);
      auto loaded = must(checkpoint.expert(layer, e));
      EXPECT_TRUE(loaded->findings.empty());
      expect_matrix(loaded->source.gate, builder.matrix(layer, e, "gate"), param.format);
      expect_matrix(loaded->source.up, builder.matrix(layer, e, "up"), param.format);
      expect_matrix(loaded->source.down, builder.matrix(layer, e, "down"), param.format);
      EXPECT_EQ(checkpoint.tensor_name(layer, e, "down"),
                builder.tensor_name(layer, e, "down", "codes"));
    }
    auto findings = must(checkpoint.validate(layer, {0, 4}));
    for (const Finding& finding : *findings)
      EXPECT_EQ(finding.severity, Severity::kNote) << to_string(finding);
    // With stacked NVFP4 experts the builder leaves the shared expert in floats. The host has to
    // add such a shared expert itself.
    if (builder.has_shared() && param.format != SourceFormat::kModelOptStacked) {
      auto shared = must(checkpoint.shared_expert(layer));
      expect_matrix(shared->source.down, builder.matrix(layer, -1, "down"), param.format);
      EXPECT_EQ(checkpoint.layer_options(layer)->shared_intermediate_size, 32);
    } else {
      EXPECT_EQ(checkpoint.shared_expert(layer).status().code(), Code::kUnsupported);
      EXPECT_EQ(checkpoint.layer_options(layer)->shared_intermediate_size, 0);
    }
  }
}

TEST_P(Load, SlicesAreTheSameBytes) {
  const Case& param = GetParam();
  BuilderOptions options{.model_type = param.model_type,
                         .format = param.format,
                         .stacked_floats = param.stacked_floats,
                         .float_dtype = param.dtype,
                         .num_experts = 2,
                         .intermediate_size = 96};
  CheckpointBuilder builder(options);
  const Opened checkpoint(builder);
  const int64_t layer = builder.layers().front();
  for (const IntermediateSlice slice : {IntermediateSlice{0, 32}, {16, 48}, {80, 16}, {48, 48}}) {
    SCOPED_TRACE(testing::Message() << slice.first << " + " << slice.count);
    auto part = must(checkpoint->expert(layer, 1, slice));
    const int64_t first = slice.first;
    const int64_t last = first + slice.count;
    EXPECT_EQ(part->source.gate.rows, slice.count);
    EXPECT_EQ(part->source.up.rows, slice.count);
    EXPECT_EQ(part->source.down.cols, slice.count);
    EXPECT_EQ(part->source.down.rows, 64);
    const BuiltMatrix& up = builder.matrix(layer, 1, "up");
    const BuiltMatrix& down = builder.matrix(layer, 1, "down");
    if (param.format == SourceFormat::kFloat) {  // quantized under the whole matrix's tensor scale:
                                                 // the whole's bytes
      auto whole = must(checkpoint->expert(layer, 1));
      EXPECT_EQ(part->source.up.tensor_scale, whole->source.up.tensor_scale);
      EXPECT_EQ(part->source.down.tensor_scale, whole->source.down.tensor_scale);
      EXPECT_EQ(codes_of(part->source.up), cut(codes_of(whole->source.up), 32, first, last, 0, 32));
      EXPECT_EQ(scales_of(part->source.up), cut(scales_of(whole->source.up), 4, first, last, 0, 4));
      EXPECT_EQ(codes_of(part->source.down),
                cut(codes_of(whole->source.down), 48, 0, 64, first / 2, last / 2));
      EXPECT_EQ(scales_of(part->source.down),
                cut(scales_of(whole->source.down), 6, 0, 64, first / 16, last / 16));
      continue;
    }
    EXPECT_EQ(codes_of(part->source.up), cut(up.codes, 32, first, last, 0, 32));
    EXPECT_EQ(codes_of(part->source.down), cut(down.codes, 48, 0, 64, first / 2, last / 2));
    if (param.format == SourceFormat::kMxfp4) {
      for (int64_t r = 0; r < 64; ++r) {
        for (int64_t c = 0; c < slice.count; ++c) {
          const uint8_t byte = down.codes[static_cast<size_t>(r * 48 + (first + c) / 2)];
          const int k = down.scales[static_cast<size_t>(r * 3 + (first + c) / 32)] - 127;
          ASSERT_EQ(decode(part->source.down, r, c),
                    std::ldexp(oracle_e2m1(c % 2 == 0 ? byte & 15 : byte >> 4), k));
        }
      }
      continue;
    }
    EXPECT_EQ(scales_of(part->source.up), cut(up.scales, 4, first, last, 0, 4));
    EXPECT_EQ(scales_of(part->source.down), cut(down.scales, 6, 0, 64, first / 16, last / 16));
  }
  for (const IntermediateSlice bad :
       {IntermediateSlice{8, 16}, {0, 24}, {-16, 16}, {96, 16}, {80, 32}}) {
    EXPECT_EQ(checkpoint->expert(layer, 1, bad).status().code(), Code::kInvalidArgument)
        << bad.first;
  }
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  std::string name = std::string(info.param.model_type) + "_" + to_string(info.param.format);
  if (info.param.format == SourceFormat::kFloat)
    name += std::string("_") + to_string(info.param.dtype);
  if (info.param.stacked_floats) name += "_stacked";
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const char* type :
       {"deepseek_v3", "deepseek_v4", "kimi_k2", "kimi_k25", "qwen2_moe", "qwen3_moe", "qwen3_next",
        "qwen3_5_moe", "glm4_moe", "glm5_next", "minimax_m2", "minimax_m3", "mixtral"}) {
    out.push_back({type, SourceFormat::kModelOpt});
    if (std::string(type) != "deepseek_v4") out.push_back({type, SourceFormat::kCompressedTensors});
    out.push_back({type, SourceFormat::kMxfp4});
    out.push_back({type, SourceFormat::kFloat});
  }
  out.push_back({"deepseek_v4", SourceFormat::kCompressedTensors});
  out.push_back({"llama4", SourceFormat::kModelOptStacked});  // K is axis 1
  out.push_back({"motif", SourceFormat::kModelOptStacked});
  out.push_back({"qwen3_5_moe", SourceFormat::kModelOptStacked});
  out.push_back({"llama4", SourceFormat::kFloat, true});
  out.push_back({"qwen3_5_moe", SourceFormat::kFloat, true});
  out.push_back({"qwen3_moe", SourceFormat::kFloat, true, DType::kF16});
  out.push_back({"qwen3_moe", SourceFormat::kFloat, false, DType::kF16});
  out.push_back({"qwen3_moe", SourceFormat::kFloat, false, DType::kF32});
  return out;
}
INSTANTIATE_TEST_SUITE_P(All, Load, testing::ValuesIn(cases()), case_name);

TEST(LoadFloat, CodesAreThoseOfTheQuantizer) {
  for (const bool stacked : {false, true}) {
    BuilderOptions options{
        .model_type = "qwen3_moe", .format = SourceFormat::kFloat, .stacked_floats = stacked};
    CheckpointBuilder builder(options);
    const Opened checkpoint(builder);
    auto loaded = must(checkpoint->expert(0, 3));
    for (const auto& [name, view] :
         {std::pair<const char*, Nvfp4View*>{"gate", &loaded->source.gate},
          {"up", &loaded->source.up},
          {"down", &loaded->source.down}}) {
      const BuiltMatrix& built = builder.matrix(0, 3, name);
      EXPECT_EQ(codes_of(*view), built.codes)
          << name;  // each with its own amax, as in the builder's quantizer
      EXPECT_EQ(scales_of(*view), built.scales) << name;
      EXPECT_EQ(view->tensor_scale, built.tensor_scale) << name;
    }
    EXPECT_NE(loaded->source.gate.tensor_scale, loaded->source.up.tensor_scale);
  }
}

TEST(LoadFloat, ANonFiniteWeightIsNamed) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .format = SourceFormat::kFloat});
  builder.matrix(0, 2, "up").weights[64 * 5 + 7] = std::numeric_limits<float>::infinity();
  const Opened checkpoint(builder);
  const Status status = checkpoint->expert(0, 2).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_EQ(status.message(),
            "layer 0 expert 2: model.layers.0.mlp.experts.2.up_proj.weight: (5, 7): expected a "
            "finite weight, got inf");
}

TEST(LoadScalars, BothShapesOfAScalarAreRead) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}}) {
    for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
      CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
      for (auto& [name, tensor] : builder.tensors()) {
        if (tensor.dtype == DType::kF32) tensor.shape = shape;
      }
      const Opened checkpoint(builder);
      ASSERT_OK(checkpoint->expert(1, 7));
      EXPECT_TRUE(checkpoint->layer_scales(1)->hidden.has_value());
    }
  }
}

// Codes and scales of three matrices, as they were read; slices are strided views of them.
TEST(LoadViews, PerExpertTensorsAreReadOnce) {
  const Opened checkpoint(CheckpointBuilder({.model_type = "deepseek_v4"}));
  for (const IntermediateSlice& slice : {IntermediateSlice{}, IntermediateSlice{16, 16}}) {
    const auto loaded = must(checkpoint->expert(0, 0, slice));
    ASSERT_EQ(loaded->storage.size(), 6u);
    EXPECT_EQ(loaded->source.gate.codes, loaded->storage[0].data());
    EXPECT_EQ(loaded->source.down.block_scales, loaded->storage[5].data());
  }
  EXPECT_EQ(checkpoint->expert(0, 8).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(checkpoint->expert(0, -1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(checkpoint->expert(2, 0).status().code(), Code::kInvalidArgument);
}

TEST(Open, ASingleFileFindsItsConfigBesideIt) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  auto checkpoint = must(Checkpoint::open(dir.file("model.safetensors")));
  EXPECT_OK(checkpoint->expert(1, 7));
  std::filesystem::remove(dir.file("config.json"));
  EXPECT_THAT(Checkpoint::open(dir.path().string()), Refused(Code::kIo, "config.json"));
}

TEST(LoadProducers, ModelOptsAndCompressedTensorsOwnFiles) {
  for (const char* name : {"modelopt_qwen3_moe", "compressed_tensors_qwen3_moe"}) {
    SCOPED_TRACE(name);
    auto checkpoint =
        must(Checkpoint::open(std::string(NVFP4_MOE_SOURCE_DIR) + "/tests/vectors/" + name));
    const ModelInfo& model = checkpoint->model();
    EXPECT_EQ(model.family, "qwen");
    for (const int64_t layer : model.layers) {
      auto findings = must(checkpoint->validate(layer, {0, model.options.num_experts}));
      for (const Finding& finding : *findings)
        EXPECT_NE(finding.severity, Severity::kError) << to_string(finding);
      for (int64_t e = 0; e < model.options.num_experts; ++e)
        EXPECT_OK(checkpoint->expert(layer, e));
      EXPECT_OK(checkpoint->statistics(layer, {0, model.options.num_experts}));
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
