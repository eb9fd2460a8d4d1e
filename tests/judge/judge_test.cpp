// Tests the judges: a plausible result passes, and every planted fault fails with its coordinates.
#include "judge/judge.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kTokens = 24;
constexpr int64_t kChannels = 256;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

MoeConfig config_of(ActivationFormat format) {
  MoeOptions options;
  set_sizes(options, 128, 8, 2048, 768);
  options.activation_format = format;
  return *MoeConfig::make(options);
}

// An output with the size of a layer's, and the same after errors of `relative` rms: what an honest
// kernel gives.
struct Pair {
  std::vector<float> expected, actual;
  float& at(int64_t token, int64_t channel) {
    return actual[static_cast<size_t>(token * kChannels + channel)];
  }
  float& expected_at(int64_t token, int64_t channel) {
    return expected[static_cast<size_t>(token * kChannels + channel)];
  }
};
Pair honest(double relative) {
  Random random(7);
  Pair pair;
  for (int64_t i = 0; i < kTokens * kChannels; ++i) {
    const double token_gain = 0.5 + static_cast<double>(i / kChannels % 5);
    const double value = token_gain * random.normal();
    pair.expected.push_back(static_cast<float>(value));
    pair.actual.push_back(static_cast<float>(value + relative * token_gain * random.normal()));
  }
  return pair;
}

std::string judge(const Pair& pair, ActivationFormat format) {
  return broken_limit(compare(pair.expected.data(), pair.actual.data(), kTokens, kChannels),
                      layer_limits(config_of(format), kTokens));
}

class Judge : public testing::TestWithParam<ActivationFormat> {
 protected:
  // A third of the batch limit: errors of this size are what the limit is for.
  Pair honest_pair() {
    return honest(layer_limits(config_of(GetParam()), kTokens).relative_l2 / 3);
  }
  std::string verdict(const Pair& pair) { return judge(pair, GetParam()); }
  // The fault turns an honest pair red.
  std::string planted(const std::function<void(Pair&)>& fault) {
    Pair pair = honest_pair();
    EXPECT_EQ(verdict(pair), "");
    fault(pair);
    return verdict(pair);
  }
};

TEST_P(Judge, ErrorsOfTwiceTheLimitFail) {
  EXPECT_THAT(verdict(honest(2 * layer_limits(config_of(GetParam()), kTokens).relative_l2)),
              HasSubstr("relative L2"));
}

// Changes each element, or each one of a token.
void each(std::vector<float>& values, float (*change)(float)) {
  for (float& x : values) x = change(x);
}
void each_of(Pair& p, int64_t token, const std::function<void(float& expected, float& actual)>& f) {
  for (int64_t c = 0; c < kChannels; ++c) f(p.expected_at(token, c), p.at(token, c));
}

// Faults that turn a pair red, and words of the message about them.
struct Fault {
  const char* name;
  std::function<void(Pair&)> plant;
  const char* words = "";
};
const Fault kFaults[] = {
    {"flipped sign of everything", [](Pair& p) { each(p.actual, [](float x) { return -x; }); }},
    {"flipped sign of one token", [](Pair& p) { each_of(p, 5, [](float&, float& x) { x = -x; }); },
     "token 5"},
    {"flipped sign of one element",
     [](Pair& p) { p.expected_at(11, 17) = 4.5f, p.at(11, 17) = -4.5f; },
     "token 11 channel 17: expected 4.5, got -4.5"},
    {"scale off by two", [](Pair& p) { each(p.actual, [](float x) { return x * 2.0f; }); }},
    {"scale off by a half", [](Pair& p) { each(p.actual, [](float x) { return x * 0.5f; }); }},
    {"one token scaled by a fourth",
     [](Pair& p) { each_of(p, 3, [](float&, float& x) { x *= 1.25f; }); }, "token 3"},
    {"transposed block",
     [](Pair& p) {
       for (int64_t i = 0; i < 16; ++i)
         for (int64_t j = 0; j < i; ++j) std::swap(p.at(i, 32 + j), p.at(j, 32 + i));
     }},
    {"one bad row",
     [](Pair& p) {
       Random random(3);
       each_of(p, 20, [&](float&, float& x) { x = static_cast<float>(random.normal()); });
     },
     "token 20"},
    {"a zero token that is not zero",
     [](Pair& p) {
       each_of(p, 2, [](float& expected, float& actual) { expected = actual = 0; });
       p.at(2, 40) = 1e-30f;
     },
     "token 2"},
    {"NaN for a number", [](Pair& p) { p.at(6, 7) = kNan; }, "token 6 channel 7"},
    {"Inf for a number", [](Pair& p) { p.at(6, 7) = kInf; }, "token 6 channel 7"},
    {"a number for NaN", [](Pair& p) { p.expected_at(6, 7) = kNan; }, "token 6 channel 7"},
    {"Inf for NaN", [](Pair& p) { p.expected_at(6, 7) = kNan, p.at(6, 7) = kInf; }},
    {"Inf for its negative", [](Pair& p) { p.expected_at(6, 7) = kInf, p.at(6, 7) = -kInf; }},
    // The trap of a relative error that divides by a signed expectation: (actual - expected) /
    // expected <= tolerance.
    {"both operands negative",
     [](Pair& p) {
       each(p.expected, [](float x) { return -std::fabs(x) - 1; });
       p.actual = p.expected;
       p.expected_at(4, 4) = -2;
       p.at(4, 4) = -100;
     },
     "token 4 channel 4: expected -2, got -100"},
    {"-100 for -2",
     [](Pair& p) {
       each(p.expected, [](float) { return -2.0f; });
       each(p.actual, [](float) { return -100.0f; });
     }},
    {"swapped tokens",
     [](Pair& p) {
       for (int64_t c = 0; c < kChannels; ++c) std::swap(p.at(0, c), p.at(5, c));
     }},
    {"zeros for numbers", [](Pair& p) { each(p.actual, [](float) { return 0.0f; }); }},
    {"numbers for zeros", [](Pair& p) { each(p.expected, [](float) { return 0.0f; }); }},
};

TEST_P(Judge, FaultsAreSeen) {
  for (const Fault& fault : kFaults) {
    const std::string verdict = planted(fault.plant);
    EXPECT_NE(verdict, "") << fault.name;
    EXPECT_THAT(verdict, HasSubstr(fault.words)) << fault.name;
  }
}

TEST_P(Judge, WhatIsEqualHolds) {
  EXPECT_EQ(planted([](Pair& p) {
              each_of(p, 6, [](float& expected, float& actual) { expected = actual = kNan; });
              each_of(p, 2, [](float& expected, float& actual) { expected = actual = 0; });
              p.at(7, 1) = p.expected_at(7, 1) = -kInf;
            }),
            "");
  for (const int64_t tokens : {0, 2}) {
    const std::vector<float> zeros(16, 0.0f);
    EXPECT_EQ(broken_limit(compare(zeros.data(), zeros.data(), tokens, 8),
                           layer_limits(config_of(GetParam()), tokens)),
              "");
  }
}

// A token of next to nothing among loud ones: a small absolute error passes, a loud one does not.
TEST_P(Judge, SmallTokenIsHeldToATenthOfTheMeanNorm) {
  const auto shrunk = [this](const std::function<void(float&)>& error) {
    return planted([&](Pair& p) {
      each_of(p, 9, [&](float& expected, float& actual) {
        actual = expected *= 1e-6f;
        error(actual);
      });
    });
  };
  EXPECT_EQ(shrunk([](float& x) { x *= 3; }), "");
  EXPECT_THAT(shrunk([](float& x) { x += x < 0 ? -0.5f : 0.5f; }), HasSubstr("token 9"));
}

// A token by itself whose rows cancel to a thousandth: errors count against its rows' norm.
TEST_P(Judge, TokenByItselfIsHeldToTheNormOfItsRows) {
  constexpr int64_t kCount = 256;
  const LayerLimits limits = token_limits(config_of(GetParam()), 8.0 * 1536);
  std::vector<float> expected(kCount), actual(kCount);
  for (int64_t c = 0; c < kCount; ++c)
    expected[static_cast<size_t>(c)] = c % 2 == 0 ? 1e-3f : -1e-3f;
  const auto verdict = [&](double error, double least_norm) {
    for (size_t c = 0; c < actual.size(); ++c)
      actual[c] = expected[c] + static_cast<float>(c % 4 < 2 ? error : -error);
    return broken_limit(compare(expected.data(), actual.data(), 1, kCount, least_norm), limits);
  };
  const double rows_norm = 1e3 * 1e-3 * std::sqrt(static_cast<double>(kCount));
  const double limit = limits.relative_l2;  // an element's error, since the rows' rms is 1
  EXPECT_EQ(verdict(0.9 * limit, rows_norm), "");
  EXPECT_THAT(verdict(1.1 * limit, rows_norm), HasSubstr("relative L2"));
  EXPECT_THAT(verdict(0.9 * limit, 0), HasSubstr("relative L2"));
  std::fill(expected.begin(), expected.end(), 0.0f);
  EXPECT_EQ(verdict(0.9 * limit, rows_norm), "");
  EXPECT_THAT(verdict(1e-9, 0), HasSubstr("relative L2"));
}

INSTANTIATE_TEST_SUITE_P(Formats, Judge,
                         testing::Values(ActivationFormat::kNvfp4, ActivationFormat::kBf16,
                                         ActivationFormat::kInt8Block, ActivationFormat::kFp8),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(LayerLimits, MoreTokensTightenTheBatchAndLoosenTheWorstToken) {
  const MoeConfig config = config_of(ActivationFormat::kNvfp4);
  const LayerLimits one = layer_limits(config, 1), many = layer_limits(config, 512);
  EXPECT_LT(many.relative_l2, one.relative_l2);
  EXPECT_GT(many.cosine, one.cosine);
  EXPECT_GE(many.worst_token_l2, one.worst_token_l2);
  EXPECT_GT(many.relative_l2, layer_limits(config_of(ActivationFormat::kBf16), 512).relative_l2);
}

TEST(LayerLimits, OneTokenWithEqualRowsHasTheLimitsOfItsLayer) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
    const MoeConfig config = config_of(format);
    const double equal = static_cast<double>(config->top_k * config->intermediate_size);
    const LayerLimits layer = layer_limits(config, 1);
    EXPECT_DOUBLE_EQ(token_limits(config, equal).relative_l2, layer.relative_l2);
    EXPECT_DOUBLE_EQ(token_limits(config, equal).worst_element, layer.worst_element);
    EXPECT_GT(token_limits(config, equal / 4).relative_l2, layer.relative_l2);
  }
}

TEST(LayerLimits, WeightOnlyLimitsAreBf16Roundings) {
  const LayerLimits limits = layer_limits(config_of(ActivationFormat::kBf16), 64);
  EXPECT_NEAR(limits.relative_l2, 4.08e-3, 1e-5);  // sqrt(2/pi) 2^-7 / sqrt(7/3)
  EXPECT_NEAR(limits.worst_token_l2, std::sqrt(3.0) * 0x1p-7,
              1e-9);  // one ulp at each of three roundings
  EXPECT_DOUBLE_EQ(limits.cosine, 1 - limits.relative_l2 * limits.relative_l2);
}

// The limits are below a format's own error against bf16 activations (9e-3 under int8_block; 3.4e-2
// a GEMM under fp8, with unrounded weights), so faulty kernels cannot pass as its rounding.
TEST(LayerLimits, AreOrderedAndBelowTheFormatsOwnErrors) {
  const auto limit = [](ActivationFormat format) {
    return layer_limits(config_of(format), 64).relative_l2;
  };
  EXPECT_GT(limit(ActivationFormat::kInt8Block), limit(ActivationFormat::kBf16));
  EXPECT_LT(limit(ActivationFormat::kInt8Block), limit(ActivationFormat::kNvfp4) / 2);
  EXPECT_LT(limit(ActivationFormat::kInt8Block), 6e-3);
  EXPECT_GT(limit(ActivationFormat::kFp8), limit(ActivationFormat::kInt8Block));
  EXPECT_LT(limit(ActivationFormat::kFp8), 3.4e-2);
}

TEST(GemmBound, IsTheContractsFormula) {
  EXPECT_DOUBLE_EQ(gemm_bound(4096, 1, 3.0, 0.25), 257 * 0x1p-22 * 3.0 + 0.25);
  EXPECT_DOUBLE_EQ(gemm_bound(16, 4, 0.0, 0.5), 0.5);
  EXPECT_DOUBLE_EQ(fp8_tensor_core_bound(80, 1, 3.0, 0.25),
                   (34 * 3 * 0x1p-13 + 0x1p-22) * 3.0 + 0.25);
  EXPECT_DOUBLE_EQ(fp8_tensor_core_bound(1 << 20, 0, 3.0, 0.5), 3.5);
}

TEST(Compare, TellsTheLargestErrorAndWhereItIs) {
  const std::vector<float> expected = {1, 2, 3, 4, 5, 6};
  std::vector<float> actual = expected;
  actual[4] = 5.5f;
  actual[1] = 1.75f;
  const Comparison c = compare(expected.data(), actual.data(), 2, 3);
  EXPECT_EQ(c.max_token, 1);
  EXPECT_EQ(c.max_channel, 1);
  EXPECT_DOUBLE_EQ(c.max_abs, 0.5);
  EXPECT_DOUBLE_EQ(c.max_expected, 5);
  EXPECT_DOUBLE_EQ(c.max_actual, 5.5);
  EXPECT_NEAR(c.relative_l2, std::sqrt(0.25 + 0.0625) / std::sqrt(91.0), 1e-12);
  EXPECT_EQ(c.worst_token, 0);  // 0.25 of sqrt(14) against 0.5 of sqrt(77)
  EXPECT_NEAR(c.worst_token_l2, 0.25 / std::sqrt(14.0), 1e-12);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
