// The activation scales from config and checkpoint, and the limits of a layer. The guards of
// tests/support/case_run.h watch the layout of its workspace in every case of the table.
#include "backend/layer_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/backends.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using ::testing::HasSubstr;

using Scale = ActivationScale;
using Inner = IntermediateScale;
using Format = ActivationFormat;

MoeOptions small() { return test::sizes_of(8, 2, 64, 48); }
MoeOptions of(Scale scale, Inner inner, Format format = Format::kNvfp4, float headroom = 1) {
  MoeOptions options = small();
  options.activation_scale = scale;
  options.intermediate_scale = inner;
  options.activation_format = format;
  options.static_headroom = headroom;
  return options;
}
MoeOptions fixed_by(Activation activation, float limit, Format format = Format::kNvfp4,
                    std::optional<float> given = {}) {
  MoeOptions options = of(Scale::kDynamicToken, Inner::kFixed, format);
  options.activation = activation;
  options.swiglu_limit = limit;
  options.intermediate_fixed = given;
  return options;
}

MoeOptions of_activation(Activation activation, Format format = Format::kNvfp4) {
  MoeOptions options = of(Scale::kDynamicToken, Inner::kFixed, format);
  options.activation = activation;
  return options;
}
MoeOptions situ_fixed(float gate_limit, float up_limit, Format format = Format::kNvfp4) {
  MoeOptions options = of_activation(Activation::kSitu, format);
  options.situ_gate_limit = gate_limit;
  options.situ_up_limit = up_limit;
  return options;
}

ActivationScales resolved(const MoeOptions& options, const LayerScales& scales = {}) {
  const auto config = MoeConfig::make(options);
  EXPECT_OK(config);
  const auto result = resolve_activation_scales(*config, scales);
  EXPECT_OK(result);
  return result.ok() ? *result : ActivationScales{-1, -1};
}

constexpr auto kDynamic = Scale::kDynamicToken;
constexpr auto kInnerDynamic = Inner::kDynamicToken;

TEST(ActivationScalesOfALayer, FollowOptionsAndCheckpoint) {
  const float sixth = 0x1p-3f / 6;
  const struct {
    MoeOptions options;
    LayerScales given;
    float hidden, intermediate;
  } cases[] = {
      {small(), {}, 0, 0},
      // static: rounded up to a power of two, times headroom, and at least the smallest normal
      // number.
      {of(Scale::kStatic, kInnerDynamic), {0.0021f, {}}, 0x1p-8f, 0},
      {of(Scale::kStatic, kInnerDynamic), {0x1p-9f, {}}, 0x1p-9f, 0},
      {of(Scale::kStatic, kInnerDynamic, Format::kNvfp4, 16), {0.0021f, {}}, 0x1p-4f, 0},
      {of(Scale::kStatic, kInnerDynamic, Format::kNvfp4, 0x1p-3f), {0x1p-140f, {}}, 0x1p-126f, 0},
      {of(Scale::kStatic, kInnerDynamic, Format::kNvfp4, 0x1p20f), {0x1p107f, {}}, 0x1p127f, 0},
      {of(Scale::kVllmOrder, Inner::kVllmOrder),
       {0.0021f, 0.0123f},
       0.0021f,
       0.0123f},  // unchanged
      // fixed of a checkpoint: sixteenfold room.
      {of(kDynamic, Inner::kFixed), {{}, 0.0021f}, 0, 0x1p-4f},
      {of(kDynamic, Inner::kFixed), {{}, 0x1p123f}, 0, 0x1p127f},
      // fixed of a clamp: the smallest that cannot saturate.
      {fixed_by(Activation::kSwigluClamped, 10), {{}, 0.01f}, 0, 0x1p-4f},  // 100 / 2688 = 0.0372
      {fixed_by(Activation::kSwigluStep, 7), {{}, 0.01f}, 0, 0x1p-5f},      // 49 / 2688 = 0.0182
      {fixed_by(Activation::kSwigluOai, 7), {{}, 0.01f}, 0, 0x1p-5f},       // 56 / 2688 = 2^-5.58
      {fixed_by(Activation::kSwigluOai, 9), {{}, 0.01f}, 0, 0x1p-4f},       // 90 / 2688 = 0.0335
      {fixed_by(Activation::kSwigluClamped, 586), {}, 0, 0x1p7f},  // a block of 0.75 becomes 0
      {fixed_by(Activation::kSwigluClamped, 478, Format::kFp8), {}, 0, 0x1p9f},
      {fixed_by(Activation::kSwigluClamped, 10, Format::kFp8), {}, 0, 0x1p-2f},  // 100 / 448
      {situ_fixed(4, 25), {{}, 0.01f}, 0, 0x1p-4f},                   // 100 / 2688 = 0.0372
      {situ_fixed(4, 25, Format::kFp8), {}, 0, 0x1p-2f},              // 100 / 448
      {situ_fixed(0x1p-3f, 0x1.5p8f), {}, 0, 0x1p-6f},                // 42 / 2688 = 2^-6
      {of_activation(Activation::kGelu), {{}, 0.0021f}, 0, 0x1p-4f},  // as a checkpoint's
      // fixed of the caller, before all others.
      {fixed_by(Activation::kSwigluClamped, 10, Format::kNvfp4, 0.25f), {{}, 0.01f}, 0, 0.25f},
      {fixed_by(Activation::kSwigluClamped, 480, Format::kFp8, 0.25f), {{}, 0.01f}, 0, 0.25f},
      // Weights only, and int8 blocks, have no scales.
      {of(Scale::kStatic, Inner::kFixed, Format::kBf16), {}, 0, 0},
      {of(kDynamic, kInnerDynamic, Format::kInt8Block), {0.01f, 0.02f}, 0, 0},
      // Rows of fp8 hold 448 times their scale and not 2688 times it.
      {of(kDynamic, kInnerDynamic, Format::kFp8), {0.01f, 0.02f}, 0, 0},
      {of(Scale::kStatic, Inner::kFixed, Format::kFp8),
       {0.01f, 0.02f},
       0x1p-4f,
       0x1p1f},  // 0.06, 16 * 0.12
      {of(Scale::kStatic, kInnerDynamic, Format::kFp8),
       {sixth, {}},
       0x1p-2f,
       0},  // fp32 rounds the sixth up ...
      {of(Scale::kStatic, kInnerDynamic, Format::kFp8),
       {std::nextafter(sixth, 0.0f), {}},
       0x1p-3f,
       0},
      {of(Scale::kStatic, kInnerDynamic, Format::kFp8, 0x1p20f), {0x1p104f, {}}, 0x1p127f, 0},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(&c - cases);
    const ActivationScales scales = resolved(c.options, c.given);
    EXPECT_EQ(scales.hidden, c.hidden);
    EXPECT_EQ(scales.intermediate, c.intermediate);
  }
}

// For every limit L the activation's largest magnitude is <= 2688 s, and not <= 2688 s/2. Below L =
// 0.2785 that magnitude is silu's minimum, found here by a walk over g.
TEST(ActivationScalesOfALayer, AFixedOneOfAClampIsTheLeastThatCannotSaturate) {
  double depth = 0;
  for (double g = -3; g < 0; g += 1e-4) depth = std::max(depth, -g / (1 + std::exp(-g)));
  for (float limit = 0.03f; limit < 580; limit *= 1.37f) {
    const double s = resolved(fixed_by(Activation::kSwigluClamped, limit)).intermediate;
    const double bound = std::max(double{limit}, depth) * limit;
    EXPECT_LE(bound, 2688 * s) << limit;
    EXPECT_GT(bound, 2688 * s / 2) << limit;
  }
  MoeOptions options = fixed_by(Activation::kSwigluClamped, 10);
  options.router_weight = RouterWeight::kBeforeDown;
  options.max_router_weight = 2.5f;
  EXPECT_EQ(resolved(options).intermediate, 0x1p-3f);  // 250 / 2688 = 0.093
  options.max_router_weight = 0.5f;  // a weight below one may still be one in another token
  EXPECT_EQ(resolved(options).intermediate, 0x1p-4f);
}

TEST(ActivationScalesOfALayer, WhatGivesNoneIsDeclined) {
  const float inf = std::numeric_limits<float>::infinity(),
              most = std::numeric_limits<float>::max();
  const MoeOptions of_static = of(Scale::kStatic, kInnerDynamic),
                   of_fixed = of(kDynamic, Inner::kFixed),
                   of_vllm_order = of(kDynamic, Inner::kVllmOrder);
  const auto of_headroom = [](Format format) {
    return of(Scale::kStatic, kInnerDynamic, format, 0x1p20f);
  };
  const auto clamped = [](float limit, Format format) {
    return fixed_by(Activation::kSwigluClamped, limit, format);
  };
  const struct {
    MoeOptions options;
    LayerScales given;
    const char* words;
  } cases[] = {
      {of_static, {}, "activation_scale static: expected a checkpoint with gate/up input_scale"},
      {of_static, {0.0f, {}}, "finite positive"},
      {of_static, {inf, {}}, "finite positive"},
      {of_fixed, {1.0f, {}}, "intermediate_scale fixed"},
      {of_vllm_order, {1.0f, std::nanf("")}, "intermediate_scale vllm_order"},
      // Beyond a float.
      {of_headroom(Format::kNvfp4),
       {0x1.8p107f, {}},
       "activation_scale static: gate/up input_scale x static_headroom: expected a row scale of at "
       "most 2^127, got 2.43388915e+32 times 1048576"},
      {of_headroom(Format::kNvfp4), {3e38f, {}}, "at most 2^127"},
      {of_headroom(Format::kFp8), {0x1p105f, {}}, "at most 2^127"},  // six times as much
      {of_fixed,
       {{}, 0x1.2p123f},
       "intermediate_scale fixed: down input_scale x 16: expected a row"},
      {of_vllm_order, {{}, 0x1p-127f}, "down input_scale within [2^-126, 2^126]"},
      {of_vllm_order, {{}, 0x1.8p126f}, "down input_scale within [2^-126, 2^126]"},
      // A limit that effectively means "none" would make every h a 0.
      {clamped(1e19f, Format::kNvfp4),
       {},
       "intermediate_scale fixed: expected a swiglu_limit whose bound of the activation's output, "
       "9.99999996e+37, leaves values of 1 above 0, got swiglu_limit 9.99999998e+18; give"},
      {clamped(most, Format::kNvfp4), {}, "swiglu_limit 3.40282347e+38"},  // its square overflows
      {clamped(587, Format::kNvfp4), {}, "leaves values of 1 above 0"},
      {clamped(480, Format::kFp8), {}, "leaves values of 1 above 0"},  // 2^-10 of a scale becomes 0
      {situ_fixed(4, 1e9f),
       {},
       "intermediate_scale fixed: expected a situ_gate_limit and a situ_up_limit whose bound of "
       "the "
       "activation's output, 4e+09, leaves values of 1 above 0, got situ_gate_limit 4 and "
       "situ_up_limit 1e+09; give"},
      {of_activation(Activation::kGeluTanh), {}, "without a given power of two or a limit"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(resolve_activation_scales(*MoeConfig::make(c.options), c.given),
                test::Refused(Code::kInvalidArgument, c.words));
  }
}

TEST(LayerLimitsOfABackend, RowsFitInt32) {
  const auto config = MoeConfig::make(small());
  ASSERT_OK(config);
  EXPECT_OK(check_layer_limits(*config, {0, 8}, {1 << 20}));
  for (const int64_t tokens : {int64_t{-1}, int64_t{1} << 31, std::numeric_limits<int64_t>::max()})
    EXPECT_FALSE(check_layer_limits(*config, {0, 8}, {tokens}).ok()) << tokens;
}

}  // namespace
}  // namespace nvfp4_moe::internal
