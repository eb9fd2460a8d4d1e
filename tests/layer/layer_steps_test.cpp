// The walk over a host workspace, and the activation scales that config and checkpoint decide.
#include "backend/layer_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using ::testing::HasSubstr;

MoeOptions small() {
  MoeOptions options;
  options.num_experts = 8;
  options.top_k = 2;
  options.hidden_size = 64;
  options.intermediate_size = 48;
  return options;
}

ActivationScales resolved(const MoeOptions& options, const LayerScales& scales = {}) {
  const auto config = MoeConfig::make(options);
  EXPECT_OK(config);
  const auto result = resolve_activation_scales(*config, scales);
  EXPECT_OK(result);
  return result.ok() ? *result : ActivationScales{-1, -1};
}
std::string declined(const MoeOptions& options, const LayerScales& scales = {}) {
  const auto config = MoeConfig::make(options);
  EXPECT_OK(config);
  const auto result = resolve_activation_scales(*config, scales);
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  return result.status().message();
}

TEST(ActivationScalesOfALayer, DynamicNeedsNothing) {
  const ActivationScales scales = resolved(small());
  EXPECT_EQ(scales.hidden, 0);
  EXPECT_EQ(scales.intermediate, 0);
}

TEST(ActivationScalesOfALayer, StaticIsRoundedUpToAPowerOfTwoTimesHeadroom) {
  MoeOptions options = small();
  options.activation_scale = ActivationScale::kStatic;
  EXPECT_EQ(resolved(options, {0.0021f, {}}).hidden, 0x1p-8f);
  EXPECT_EQ(resolved(options, {0x1p-9f, {}}).hidden, 0x1p-9f);
  options.static_headroom = 16;
  EXPECT_EQ(resolved(options, {0.0021f, {}}).hidden, 0x1p-4f);
}

TEST(ActivationScalesOfALayer, CompatIsTheNumberAsItIs) {
  MoeOptions options = small();
  options.activation_scale = ActivationScale::kCompat;
  options.intermediate_scale = IntermediateScale::kCompat;
  const ActivationScales scales = resolved(options, {0.0021f, 0.0123f});
  EXPECT_EQ(scales.hidden, 0.0021f);
  EXPECT_EQ(scales.intermediate, 0.0123f);
}

TEST(ActivationScalesOfALayer, FixedComesFromTheCallerFirst) {
  MoeOptions options = small();
  options.activation = Activation::kSwigluClamped;
  options.swiglu_limit = 10;
  options.intermediate_scale = IntermediateScale::kFixed;
  options.intermediate_fixed = 0.25f;
  EXPECT_EQ(resolved(options, {{}, 0.01f}).intermediate, 0.25f);
}

TEST(ActivationScalesOfALayer, FixedFromTheClampIsTheLeastThatCannotSaturate) {
  MoeOptions options = small();
  options.intermediate_scale = IntermediateScale::kFixed;
  const auto with = [&](Activation activation, float limit) {
    options.activation = activation;
    options.swiglu_limit = limit;
    return resolved(options, {{}, 0.01f}).intermediate;
  };
  EXPECT_EQ(with(Activation::kSwigluClamped, 10), 0x1p-4f);  // 100 / 2688 = 0.0372
  EXPECT_EQ(with(Activation::kSwigluStep, 7), 0x1p-5f);      // 49 / 2688 = 0.0182
  EXPECT_EQ(with(Activation::kSwigluOai, 7), 0x1p-5f);       // 56 / 2688 = 2^-5.58
  EXPECT_EQ(with(Activation::kSwigluOai, 9), 0x1p-4f);       // 90 / 2688 = 0.0335
  // Whatever L: what the activation reaches is <= 2688 s, and not <= 2688 s/2. Below L = 0.2785 it is silu's minimum,
  // found here by a walk over g, that counts.
  double depth = 0;
  for (double g = -3; g < 0; g += 1e-4) depth = std::max(depth, -g / (1 + std::exp(-g)));
  for (float limit = 0.03f; limit < 580; limit *= 1.37f) {
    const double s = with(Activation::kSwigluClamped, limit), bound = std::max(double{limit}, depth) * limit;
    EXPECT_LE(bound, 2688 * s) << limit;
    EXPECT_GT(bound, 2688 * s / 2) << limit;
  }
  options.router_weight = RouterWeight::kBeforeDown;
  options.max_router_weight = 2.5f;
  EXPECT_EQ(with(Activation::kSwigluClamped, 10), 0x1p-3f);  // 250 / 2688 = 0.093
  options.max_router_weight = 0.5f;                          // a weight below one may still be one in another token
  EXPECT_EQ(with(Activation::kSwigluClamped, 10), 0x1p-4f);
}

TEST(ActivationScalesOfALayer, FixedFromTheCheckpointHasSixteenfoldRoom) {
  MoeOptions options = small();
  options.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_EQ(resolved(options, {{}, 0.0021f}).intermediate, 0x1p-4f);
}

TEST(ActivationScalesOfALayer, NothingToGoByIsDeclined) {
  MoeOptions options = small();
  options.activation_scale = ActivationScale::kStatic;
  EXPECT_THAT(declined(options), HasSubstr("activation_scale static: expected a checkpoint with gate/up input_scale"));
  EXPECT_THAT(declined(options, {0.0f, {}}), HasSubstr("finite positive"));
  EXPECT_THAT(declined(options, {std::numeric_limits<float>::infinity(), {}}), HasSubstr("finite positive"));
  options = small();
  options.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_THAT(declined(options, {1.0f, {}}), HasSubstr("intermediate_scale fixed"));
  options.intermediate_scale = IntermediateScale::kCompat;
  EXPECT_THAT(declined(options, {1.0f, std::nanf("")}), HasSubstr("intermediate_scale compat"));
}

TEST(ActivationScalesOfALayer, ScalesBeyondAFloatAreDeclined) {
  MoeOptions options = small();
  options.activation_scale = ActivationScale::kStatic;
  options.static_headroom = 0x1p20f;
  EXPECT_EQ(resolved(options, {0x1p107f, {}}).hidden, 0x1p127f);
  EXPECT_EQ(
      declined(options, {0x1.8p107f, {}}),
      "activation_scale static: gate/up input_scale x static_headroom: expected a row scale of at most 2^127, got "
      "2.43388915e+32 times 1048576");
  EXPECT_THAT(declined(options, {3e38f, {}}), HasSubstr("at most 2^127"));
  options.activation_format = ActivationFormat::kFp8;  // six times as much
  EXPECT_EQ(resolved(options, {0x1p104f, {}}).hidden, 0x1p127f);
  EXPECT_THAT(declined(options, {0x1p105f, {}}), HasSubstr("at most 2^127"));
  options = small();
  options.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_EQ(resolved(options, {{}, 0x1p123f}).intermediate, 0x1p127f);
  EXPECT_THAT(declined(options, {{}, 0x1.2p123f}),
              HasSubstr("intermediate_scale fixed: down input_scale x 16: expected a row scale of at most 2^127"));
  options.intermediate_scale = IntermediateScale::kCompat;
  for (const float no : {0x1p-127f, 0x1.8p126f})
    EXPECT_THAT(declined(options, {{}, no}), HasSubstr("down input_scale within [2^-126, 2^126]")) << no;
}

TEST(ActivationScalesOfALayer, StaticIsAtLeastTheLeastNormalNumber) {
  MoeOptions options = small();
  options.activation_scale = ActivationScale::kStatic;
  options.static_headroom = 0x1p-3f;
  EXPECT_EQ(resolved(options, {0x1p-140f, {}}).hidden, 0x1p-126f);
}

// A limit that stands for "none" would make every h a 0.
TEST(ActivationScalesOfALayer, FixedFromAClampThatIsNoneIsDeclined) {
  MoeOptions options = small();
  options.intermediate_scale = IntermediateScale::kFixed;
  options.activation = Activation::kSwigluClamped;
  options.swiglu_limit = 1e19f;
  EXPECT_EQ(declined(options),
            "intermediate_scale fixed: expected a swiglu_limit whose bound of the activation's output, 9.99999996e+37, "
            "leaves values of 1 above 0, got swiglu_limit 9.99999998e+18; give intermediate_fixed, or take "
            "intermediate_scale dynamic_token");
  options.swiglu_limit = std::numeric_limits<float>::max();  // its square is no float
  EXPECT_THAT(declined(options), HasSubstr("swiglu_limit 3.40282347e+38"));
  options.swiglu_limit = 586.0f;  // 2^7: a block of 0.75 becomes 0
  EXPECT_EQ(resolved(options).intermediate, 0x1p7f);
  options.swiglu_limit = 587.0f;
  EXPECT_THAT(declined(options), HasSubstr("leaves values of 1 above 0"));
  options.activation_format = ActivationFormat::kFp8;  // 2^-10 of a scale becomes 0, and 448 of it is the range
  EXPECT_THAT(declined(options), HasSubstr("leaves values of 1 above 0"));
  options.swiglu_limit = 478.0f;
  EXPECT_EQ(resolved(options).intermediate, 0x1p9f);
  options.swiglu_limit = 480.0f;
  EXPECT_THAT(declined(options), HasSubstr("leaves values of 1 above 0"));
  options.intermediate_fixed = 0x1p-3f;
  EXPECT_EQ(resolved(options).intermediate, 0x1p-3f);
}

TEST(ActivationScalesOfALayer, WeightOnlyAsksForNone) {
  MoeOptions options = small();
  options.activation_format = ActivationFormat::kBf16;
  options.activation_scale = ActivationScale::kStatic;
  options.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_EQ(resolved(options).hidden, 0);
}

TEST(ActivationScalesOfALayer, Int8BlocksHaveTheirOwn) {
  MoeOptions options = small();
  options.activation_format = ActivationFormat::kInt8Block;
  EXPECT_EQ(resolved(options, {0.01f, 0.02f}).hidden, 0);
  EXPECT_EQ(resolved(options, {0.01f, 0.02f}).intermediate, 0);
}

// The same numbers of the checkpoint under fp8, whose rows hold 448 times their scale and not 2688 times it.
TEST(ActivationScalesOfALayer, Fp8HoldsASixthOfTheRange) {
  MoeOptions options = small();
  options.activation_format = ActivationFormat::kFp8;
  EXPECT_EQ(resolved(options, {0.01f, 0.02f}).hidden, 0);
  options.activation_scale = ActivationScale::kStatic;
  options.intermediate_scale = IntermediateScale::kFixed;
  EXPECT_EQ(resolved(options, {0.01f, 0.02f}).hidden, 0x1p-4f);             // 0.06
  EXPECT_EQ(resolved(options, {0.01f, 0.02f}).intermediate, 16 * 0x1p-3f);  // 0.12
  EXPECT_EQ(resolved(options, {0x1p-3f / 6, 0.02f}).hidden, 0x1p-2f);       // fp32 rounds the sixth up ...
  EXPECT_EQ(resolved(options, {std::nextafter(0x1p-3f / 6, 0.0f), 0.02f}).hidden, 0x1p-3f);  // ... and this is below it
  options.activation = Activation::kSwigluClamped;
  options.swiglu_limit = 10.0f;
  EXPECT_EQ(resolved(options, {0.01f, {}}).intermediate, 0x1p-2f);  // 100 / 448
  options.intermediate_fixed = 0x1p-9f;
  EXPECT_EQ(resolved(options, {0.01f, {}}).intermediate, 0x1p-9f);
}

TEST(LayerLayout, PlacesWhatItMeasures) {
  for (ActivationFormat format :
       {ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kInt8Block, ActivationFormat::kFp8}) {
    for (int64_t shared : {0, 32}) {
      MoeOptions options = small();
      options.activation_format = format;
      options.shared_intermediate_size = shared;
      const auto config = MoeConfig::make(options);
      ASSERT_OK(config);
      const ExpertRange range{2, 4};
      const auto layout = WorkspaceLayout::of([&](Arena& arena) { layer_buffers(*config, range, 10, arena); }, 64);
      std::vector<std::byte> storage(layout.total_bytes + 256);
      std::byte* base = storage.data() + (256 - reinterpret_cast<uintptr_t>(storage.data()) % 256);
      Arena arena(base, 64);
      const LayerBuffers buffers = layer_buffers(*config, range, 10, arena);
      EXPECT_EQ(arena.size_bytes(), layout.total_bytes);
      const auto at = [&](const char* name) -> const void* {
        for (const auto& span : layout.spans)
          if (span.name == name) return base + span.offset_bytes;
        return nullptr;
      };
      const auto size = [&](const char* name) {
        for (const auto& span : layout.spans)
          if (span.name == name) return span.size_bytes;
        return size_t{0};
      };
      EXPECT_EQ(buffers.status, at("status"));
      EXPECT_EQ(layout.spans[0].name, "status");
      EXPECT_EQ(buffers.row_of_assignment, at("row_of_assignment"));
      EXPECT_EQ(size("row_of_assignment"), 10u * 2 * 4);
      EXPECT_EQ(buffers.routed.hidden.codes, at("hidden.codes"));
      EXPECT_EQ(buffers.routed.hidden.bf16, at("hidden.bf16"));
      EXPECT_EQ(buffers.routed.hidden.int8_codes, at("hidden.int8_codes"));
      EXPECT_EQ(buffers.routed.hidden.int8_scales, at("hidden.int8_scales"));
      EXPECT_EQ(buffers.routed.intermediate.int8_codes, at("routed.int8_codes"));
      const bool int8 = format == ActivationFormat::kInt8Block;
      EXPECT_EQ(size("hidden.int8_codes"), int8 ? 10u * 64 : 0u);
      EXPECT_EQ(size("routed.int8_scales"), int8 ? 20u * 3 * 4 : 0u);
      const bool fp8 = format == ActivationFormat::kFp8;
      EXPECT_EQ(buffers.routed.hidden.fp8, at("hidden.fp8"));
      EXPECT_EQ(size("hidden.fp8"), fp8 ? 10u * 64 : 0u);
      EXPECT_EQ(size("routed.fp8"), fp8 ? 20u * 48 : 0u);
      EXPECT_EQ(size("routed.row_scale"), fp8 || format == ActivationFormat::kNvfp4 ? 20u * 4 : 0u);
      EXPECT_EQ(size("routed.codes"), format == ActivationFormat::kNvfp4 ? 20u * 24 : 0u);
      EXPECT_EQ(buffers.routed.intermediate.bf16, at("routed.bf16"));
      EXPECT_EQ(size("routed.bf16"), 20u * 48 * 2);
      EXPECT_EQ(buffers.routed.rows_out, at("routed.rows_out"));
      EXPECT_EQ(size("routed.rows_out"), 20u * 64 * 2);
      EXPECT_EQ(buffers.routed.row_offsets, at("routed.row_offsets"));
      EXPECT_EQ(size("routed.row_offsets"), 5u * 8);
      EXPECT_EQ(buffers.routed.assignment_of_row, at("routed.assignment_of_row"));
      EXPECT_EQ(buffers.shared.experts, shared > 0 ? 1 : 0);
      EXPECT_EQ(buffers.shared.assignment_of_row, nullptr);
      EXPECT_EQ(size("shared.bf16"), shared > 0 ? 10u * 32 * 2 : 0u);
    }
  }
}

// Both parts multiply the same arrays, unless the routed experts' are weighed and somebody reads the others.
TEST(LayerLayout, OnInputAloneHasTwoHiddens) {
  MoeOptions options = small();
  options.top_k = 1;
  for (int64_t shared : {0, 32})
    for (RouterWeight weight : {RouterWeight::kAfterDown, RouterWeight::kBeforeDown, RouterWeight::kOnInput}) {
      options.shared_intermediate_size = shared;
      options.router_weight = weight;
      const bool on_input = weight == RouterWeight::kOnInput;
      alignas(256) static std::byte storage[1 << 18];
      Arena arena(storage);
      const LayerBuffers buffers = layer_buffers(*MoeConfig::make(options), {0, 8}, 10, arena);
      ASSERT_LE(arena.size_bytes(), sizeof(storage));
      EXPECT_EQ(buffers.weighted_hidden != nullptr, on_input);
      EXPECT_NE(buffers.routed.hidden.codes, nullptr);
      EXPECT_EQ(buffers.shared.hidden.codes != nullptr, shared > 0);
      if (shared == 0) continue;
      EXPECT_EQ(buffers.shared.hidden.codes != buffers.routed.hidden.codes, on_input);
      EXPECT_EQ(buffers.shared.hidden.nonfinite != buffers.routed.hidden.nonfinite, on_input);
    }
}

TEST(LayerLimitsOfABackend, RowsFitInt32) {
  const auto config = MoeConfig::make(small());
  ASSERT_OK(config);
  EXPECT_OK(check_layer_limits(*config, {0, 8}, {1 << 20}));
  EXPECT_FALSE(check_layer_limits(*config, {0, 8}, {-1}).ok());
  EXPECT_FALSE(check_layer_limits(*config, {0, 8}, {int64_t{1} << 31}).ok());
  EXPECT_FALSE(check_layer_limits(*config, {0, 8}, {std::numeric_limits<int64_t>::max()}).ok());
}

}  // namespace
}  // namespace nvfp4_moe::internal
