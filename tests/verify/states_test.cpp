#include "verify/states.h"

#include <cmath>
#include <filesystem>
#include <set>

#include "core/float_formats.h"
#include "quantize/models.h"
#include "support/read_tensor.h"
#include "support/sizes.h"
#include "support/write_tensors.h"
#include "verify/calibrate.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

MoeOptions layer() { return test::sizes_of(6, 3, 256, 64); }

// If weights were shares of 1, they would all be 1 for one expert a token, and a layer that ignores
// them would pass.
TEST(States, SeededWeightsOfOnInputDiffer) {
  MoeOptions o = layer();
  o.top_k = 1;
  o.router_weight = RouterWeight::kOnInput;
  const LayerStates states = seeded_states(o, 3, {});
  const std::set<float> weights(states.topk_weights.begin(), states.topk_weights.end());
  EXPECT_GT(weights.size(), states.topk_weights.size() / 2);
  EXPECT_GT(*weights.begin(), 0.0f);
  EXPECT_LT(*weights.rbegin(), 1.0f);
}

TEST(States, SeededOnesAreDeterministicWithOutliersAndDistinctIds) {
  StatesOptions options;
  options.tokens = 64;
  const LayerStates a = seeded_states(layer(), 3, options), b = seeded_states(layer(), 3, options);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.topk_ids, b.topk_ids);
  EXPECT_EQ(a.topk_weights, b.topk_weights);
  EXPECT_NE(a.hidden, seeded_states(layer(), 4, options).hidden);
  options.seed = 43;
  EXPECT_NE(a.hidden, seeded_states(layer(), 3, options).hidden);
  std::vector<float> x(64 * 256);
  to_floats(a.hidden.data(), a.hidden_dtype, 64 * 256, x.data());
  double sum2 = 0, most = 0;
  for (const float v : x) {
    ASSERT_TRUE(std::isfinite(v));
    sum2 += double{v} * v;
    most = std::max(most, std::fabs(double{v}));
  }
  EXPECT_GT(most / std::sqrt(sum2 / static_cast<double>(x.size())), 6.0);
  for (size_t t = 0; t < 64; ++t) {
    const std::set<int32_t> ids(a.topk_ids.begin() + static_cast<long>(3 * t),
                                a.topk_ids.begin() + static_cast<long>(3 * t + 3));
    EXPECT_EQ(ids.size(), 3u);
    EXPECT_GE(*ids.begin(), 0);
    EXPECT_LT(*ids.rbegin(), 6);
    EXPECT_NEAR(a.topk_weights[3 * t] + a.topk_weights[3 * t + 1] + a.topk_weights[3 * t + 2], 1.0f,
                1e-6f);
  }
  options.skipped_share = 0.5;
  const LayerStates sparse = seeded_states(layer(), 3, options);
  const auto skipped = std::count(sparse.topk_ids.begin(), sparse.topk_ids.end(), -1);
  EXPECT_GT(skipped, 50);
  EXPECT_LT(skipped, 142);
}

TEST(States, AreReadByLayerOrForAll) {
  TempDir dir;
  const std::vector<float> shared(4 * 256, 0.5f), own(2 * 256, -2.0f), weights(12, 0.25f);
  const std::vector<int64_t> ids = {0, 1, 2, 3, 4, 5, -1, 0, 1, 2, 2, 2};
  write_named_tensors(dir.file("s.safetensors"),
                      {tensor("hidden", DType::kF32, {4, 256}, shared),
                       tensor("layers.1.hidden", DType::kF32, {2, 256}, own),
                       tensor("topk_ids", DType::kI64, {4, 3}, ids),
                       tensor("topk_weights", DType::kF32, {4, 3}, weights)});
  StatesOptions options;
  options.tokens = 3;
  const auto zero = must(load_states(dir.file("s.safetensors"), layer(), 0, options));
  EXPECT_EQ(zero->tokens, 3);
  EXPECT_TRUE(zero->ids_from_file);
  EXPECT_TRUE(zero->weights_from_file);
  EXPECT_EQ(zero->topk_ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, -1, 0, 1}));
  EXPECT_EQ(zero->topk_weights, std::vector<float>(9, 0.25f));
  options.tokens = 0;
  const auto one = must(load_states(dir.file("s.safetensors"), layer(), 1, options));
  EXPECT_EQ(one->tokens, 2);
  EXPECT_FALSE(one->ids_from_file);
  EXPECT_FALSE(one->weights_from_file);
  EXPECT_EQ(one->topk_ids.size(), 6u) << "ids of the other prefix are not this layer's";
  float first = 0;
  to_floats(one->hidden.data(), one->hidden_dtype, 1, &first);
  EXPECT_EQ(first, -2.0f);
}

TEST(States, WhatDoesNotFitIsRefusedByName) {
  TempDir dir;
  const struct {
    const char *name, *words;
    DType dtype;
    int64_t cols;
  } cases[] = {
      {"hidden", "expected (tokens, 256)", DType::kF32, 128},
      {"hidden", "BF16, F16 or F32", DType::kI32, 256},
      {"topk_ids", "expected -1 to 5", DType::kI32, 3},
      {"topk_ids", "expected (4, 3)", DType::kI32, 2},
      {"topk_ids", "I32 or I64", DType::kF32, 3},
      {"topk_weights", "F32", DType::kI32, 3},
  };
  for (const auto& [name, words, dtype, cols] : cases) {
    std::vector<NamedTensor> tensors = {
        tensor(name, dtype, {4, cols}, std::vector<int32_t>(static_cast<size_t>(4 * cols), 6))};
    if (name != std::string("hidden"))
      tensors.push_back(tensor("hidden", DType::kF32, {4, 256}, std::vector<float>(1024)));
    write_named_tensors(dir.file("s.safetensors"), tensors);
    const Status status = load_states(dir.file("s.safetensors"), layer(), 0, {}).status();
    EXPECT_EQ(status.code(), Code::kBadInput);
    EXPECT_THAT(status.message(), testing::HasSubstr(words));
  }
  EXPECT_FALSE(load_states(dir.file("none.safetensors"), layer(), 0, {}).ok());
}

class Calibrate : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(dir_.file("in"), model_));
    ASSERT_OK(quantize_checkpoint(dir_.file("in"), dir_.file("out")));
  }
  SynthesizeOptions model_ = [] {
    SynthesizeOptions o = tiny_model(2, 6, 128, 64);
    o.top_k = 3;
    return o;
  }();
  TempDir dir_;
};

// Compares with the layer computed here, in double, from the decoded weights.
TEST_F(Calibrate, MeasuresWhatTheLayerComputes) {
  const auto checkpoint = must(Checkpoint::open(dir_.file("out")));
  CalibrateOptions options;
  options.states.tokens = 9;
  options.states.skipped_share = 0.6;
  options.moments = dir_.file("moments");
  const auto calibration = must(calibrate(*checkpoint, options));
  ASSERT_EQ(calibration->layers.size(), 2u);
  EXPECT_FALSE(calibration->notes.empty()) << "seeded states are told";
  const auto moments = must(SafetensorsFile::open(options.moments));
  for (const LayerCalibration& got : calibration->layers) {
    std::vector<double> hidden_moments(6 * 128), intermediate_moments(6 * 64);
    std::vector<int64_t> rows(6);
    const MoeOptions o = *checkpoint->layer_options(got.layer);
    const LayerStates states = seeded_states(o, got.layer, options.states);
    std::vector<float> x(static_cast<size_t>(9 * 128));
    to_floats(states.hidden.data(), states.hidden_dtype, 9 * 128, x.data());
    double hidden = 0, intermediate = 0;
    for (size_t choice = 0; choice < 27; ++choice) {
      const int32_t id = states.topk_ids[choice];
      if (id < 0) continue;
      const float* token = x.data() + choice / 3 * 128;
      const auto e = static_cast<size_t>(id);
      ++rows[e];
      for (size_t c = 0; c < 128; ++c) {
        hidden = std::max(hidden, std::fabs(double{token[c]}));
        hidden_moments[e * 128 + c] += double{token[c]} * double{token[c]};
      }
      const auto expert = must(checkpoint->expert(got.layer, id));
      const auto dot = [&](const Nvfp4View& v, int64_t row) {
        double sum = 0;
        for (int64_t c = 0; c < v.cols; ++c) {
          const uint8_t byte = v.row_codes(row)[c / 2];
          sum += double{token[c]} *
                 double{e2m1_to_float(c % 2 == 0 ? low_code(byte) : high_code(byte))} *
                 double{e4m3_to_float(v.row_scales(row)[c / 16])} * double{v.tensor_scale};
        }
        return sum;
      };
      for (int64_t row = 0; row < 64; ++row) {
        const double g = std::min(dot(expert->source.gate, row), 10.0);
        const double u = std::clamp(dot(expert->source.up, row), -10.0, 10.0);
        double h = g / (1 + std::exp(-g)) * u;
        EXPECT_EQ(o.router_weight, RouterWeight::kBeforeDown);
        h *= double{states.topk_weights[choice]};
        intermediate = std::max(intermediate, std::fabs(h));
        intermediate_moments[e * 64 + static_cast<size_t>(row)] += h * h;
      }
    }
    EXPECT_EQ(got.hidden_amax, static_cast<float>(hidden));
    EXPECT_NEAR(got.intermediate_amax, intermediate, intermediate * 0x1p-7)
        << "one rounding to bf16";
    const std::string prefix = "layers." + std::to_string(got.layer) + ".";
    EXPECT_EQ(read_tensor<int64_t>(*moments, *moments->find(prefix + "rows")), rows);
    const auto of_hidden = read_tensor<float>(*moments, *moments->find(prefix + "hidden_moments"));
    const auto of_intermediate =
        read_tensor<float>(*moments, *moments->find(prefix + "intermediate_moments"));
    ASSERT_EQ(of_hidden.size(), hidden_moments.size());
    ASSERT_EQ(of_intermediate.size(), intermediate_moments.size());
    const auto mean = [&](const std::vector<double>& sums, size_t i, size_t cols) {
      return rows[i / cols] == 0 ? 0.0 : sums[i] / static_cast<double>(rows[i / cols]);
    };
    for (size_t i = 0; i < of_hidden.size(); ++i)
      EXPECT_EQ(of_hidden[i], static_cast<float>(mean(hidden_moments, i, 128)))
          << "bf16 squares are exact in double";
    for (size_t i = 0; i < of_intermediate.size(); ++i) {
      const double expected = mean(intermediate_moments, i, 64);
      EXPECT_NEAR(double{of_intermediate[i]}, expected, expected * 0x1p-6)
          << "squares of values rounded to bf16";
    }
    EXPECT_TRUE(got.router_weighted);
    EXPECT_EQ(got.scales().hidden, static_cast<float>(hidden / 2688));
  }
}

// Llama-4: the routed experts quantize hidden times its router weight, a shared expert hidden
// itself.
TEST(CalibrateOnInput, MeasuresWhatIsQuantized) {
  TempDir dir;
  CheckpointBuilder builder({.model_type = "llama4", .format = SourceFormat::kModelOptStacked});
  ASSERT_OK(builder.write(dir.file("llama4")));
  const auto checkpoint = must(Checkpoint::open(dir.file("llama4")));
  const int64_t number = checkpoint->model().layers.front();
  const auto source = must(layer_source(*checkpoint, number));
  MoeOptions o = *checkpoint->layer_options(number);
  ASSERT_EQ(o.router_weight, RouterWeight::kOnInput);
  StatesOptions few;
  few.tokens = 9;
  const LayerStates states = seeded_states(o, number, few);
  ASSERT_EQ(states.hidden_dtype, DType::kBf16);
  std::vector<float> x(static_cast<size_t>(9 * o.hidden_size));
  to_floats(states.hidden.data(), states.hidden_dtype, 9 * o.hidden_size, x.data());
  float hidden = 0, weighted = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t token = i / static_cast<size_t>(o.hidden_size);
    if (states.topk_ids[token] < 0) continue;
    const float weight = bf16_to_float(bf16_from_float(states.topk_weights[token]));
    hidden = std::max(hidden, std::fabs(x[i]));
    weighted = std::max(weighted, bf16_to_float(bf16_from_float(std::fabs(x[i] * weight))));
  }
  const auto measured = [&](int64_t shared_size) {
    o.shared_intermediate_size = shared_size;
    const auto layer = calibrate_layer(*source, o, {0, o.num_experts}, states.batch(),
                                       serial_executor(), states.source);
    EXPECT_OK(layer);
    return layer.ok() ? layer->hidden_amax : -1.0f;
  };
  EXPECT_NE(hidden, weighted);
  EXPECT_EQ(measured(0), weighted);
  EXPECT_EQ(measured(64), std::max(hidden, weighted));
}

TEST_F(Calibrate, ScalesReachTheCheckpointAndTheLayer) {
  const auto checkpoint = must(Checkpoint::open(dir_.file("out")));
  CalibrateOptions options;
  options.layers = {1};
  const auto calibration = must(calibrate(*checkpoint, options));
  ASSERT_EQ(calibration->layers.size(), 1u);
  EXPECT_EQ(calibration->layers[0].tokens, 32);
  ASSERT_OK(write_input_scales(dir_.file("out"), dir_.file("scaled"), calibration->scales()));
  const auto scaled = must(Checkpoint::open(dir_.file("scaled")));
  EXPECT_EQ(scaled->layer_scales(1)->hidden, calibration->layers[0].scales().hidden);
  EXPECT_EQ(scaled->layer_scales(1)->intermediate, calibration->layers[0].scales().intermediate);
  EXPECT_EQ(scaled->layer_scales(0)->hidden, 1.0f);
}

TEST_F(Calibrate, NonFiniteStatesAndWrongLayersAreRefused) {
  const auto checkpoint = must(Checkpoint::open(dir_.file("out")));
  CalibrateOptions options;
  options.layers = {5};
  EXPECT_EQ(calibrate(*checkpoint, options).status().code(), Code::kInvalidArgument);
  options.layers = {0};
  options.moments = dir_.file("out");
  EXPECT_EQ(calibrate(*checkpoint, options).status().code(), Code::kInvalidArgument)
      << "there is something";
  options.moments = dir_.file("new");
  std::vector<float> hidden(2 * 128, 1.0f);
  hidden[130] = INFINITY;
  write_named_tensors(dir_.file("s.safetensors"),
                      {tensor("hidden", DType::kF32, {2, 128}, hidden)});
  options.layers = {};
  options.input = dir_.file("s.safetensors");
  const Status status = calibrate(*checkpoint, options).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_NE(status.message().find("token 1"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(options.moments)) << "half a file is none";
}

}  // namespace
}  // namespace nvfp4_moe::internal
