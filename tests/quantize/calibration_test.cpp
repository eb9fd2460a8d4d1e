// Quantizing with weighted errors. GGUF imatrices: tests/python/test_calibration.py.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "checkpoint/experts.h"
#include "checkpoint/float_experts.h"
#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kExperts = 4, kHidden = 128, kIntermediate = 64;

// One layer's moments: (experts, columns) each.
struct Moments {
  std::vector<int64_t> rows = std::vector<int64_t>(kExperts, 7);
  std::vector<float> hidden = std::vector<float>(kExperts * kHidden);
  std::vector<float> intermediate = std::vector<float>(kExperts * kIntermediate);
};

Moments random_moments(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Moments moments;
  for (float& value : moments.hidden) value = std::exp(2 * normal(random));
  for (float& value : moments.intermediate) value = std::exp(3 * normal(random) - 20);
  return moments;
}

void write_moments(const std::string& path, const std::vector<Moments>& layers) {
  std::map<std::string, RawTensor> tensors;
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::string prefix = "layers." + std::to_string(l) + ".";
    tensors[prefix + "rows"] = raw_tensor(DType::kI64, {kExperts}, layers[l].rows);
    tensors[prefix + "hidden_moments"] =
        raw_tensor(DType::kF32, {kExperts, kHidden}, layers[l].hidden);
    tensors[prefix + "intermediate_moments"] =
        raw_tensor(DType::kF32, {kExperts, kIntermediate}, layers[l].intermediate);
  }
  ASSERT_OK(write_tensors(path, tensors));
}

// imatrix.dat as llama.cpp writes it.
class DatWriter {
 public:
  DatWriter& number(int32_t value) { return raw(&value, sizeof(value)); }
  DatWriter& text(const std::string& value) {
    return number(static_cast<int32_t>(value.size())).raw(value.data(), value.size());
  }
  DatWriter& entry(const std::string& name, const std::vector<float>& values, int32_t calls = 3) {
    text(name).number(calls).number(static_cast<int32_t>(values.size()));
    return raw(values.data(), values.size() * sizeof(float));
  }
  void write(const std::string& path) const { std::ofstream(path, std::ios::binary) << bytes_; }
  std::string bytes_;

 private:
  DatWriter& raw(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
    return *this;
  }
};

class QuantizeCalibrated : public testing::Test {
 protected:
  void SetUp() override {
    SynthesizeOptions o{.layers = 2,
                        .num_experts = kExperts,
                        .top_k = 2,
                        .hidden_size = kHidden,
                        .intermediate_size = kIntermediate,
                        .vocab_size = 32};
    ASSERT_OK(synthesize_checkpoint(in(), o));
    write_moments(file(), layers_);
    options_.search = ScaleSearch::kSweep;
    options_.calibration = file();
  }
  std::string in() const { return dir_.file("in"); }
  std::string file() const { return dir_.file("moments"); }

  // Compares an expert of layer 1 with the codes and block scales that the quantizer gives for
  // these weights.
  void expect_expert(const std::string& out, int64_t expert, const Moments& moments,
                     ScaleSearch search, bool weighted) {
    const auto source = must(Checkpoint::open(in())), target = must(Checkpoint::open(out));
    auto floats = must(float_expert(*source, 1, expert));
    const auto loaded = must(target->expert(1, expert));
    FloatWeights* const matrices[] = {&floats->gate, &floats->up, &floats->down};
    const Nvfp4View* const views[] = {&loaded->source.gate, &loaded->source.up,
                                      &loaded->source.down};
    for (int p = 0; p < 3; ++p) {
      FloatWeights& matrix = *matrices[p];
      ASSERT_OK(matrix.fetch());
      const std::vector<float>& all = p == 2 ? moments.intermediate : moments.hidden;
      std::vector<float> weights(all.begin() + expert * matrix.cols,
                                 all.begin() + (expert + 1) * matrix.cols);
      // A hundredth of the mean is added. Rounding in the last bits does not change the search's
      // result.
      const double mean = std::accumulate(weights.begin(), weights.end(), 0.0) /
                          static_cast<double>(weights.size());
      for (float& weight : weights)
        weight = static_cast<float>(static_cast<double>(weight) / mean + 0.01);
      std::vector<float> x(static_cast<size_t>(matrix.rows * matrix.cols));
      for (int64_t r = 0; r < matrix.rows; ++r) matrix.read_row(r, x.data() + r * matrix.cols);
      std::vector<uint8_t> codes(x.size() / 2), scales(x.size() / 16);
      QuantizeCounts counts;
      ASSERT_OK(
          quantize_weights(x, matrix.rows, matrix.cols, views[p]->tensor_scale, search,
                           codes.data(), scales.data(), counts, nullptr, nullptr,
                           weighted ? std::span<const float>(weights) : std::span<const float>()));
      EXPECT_EQ(scales_of(*views[p]), scales) << "matrix " << p;
      EXPECT_EQ(codes_of(*views[p]), codes) << "matrix " << p;
    }
  }

  Status refusal(const std::function<void(QuantizeOptions&)>& change = {}) {
    QuantizeOptions options = options_;
    if (change) change(options);
    const Status status = quantize_checkpoint(in(), dir_.file("refused"), options).status();
    EXPECT_FALSE(fs::exists(dir_.file("refused")))
        << "nothing is written before the moments are known to be right";
    return status;
  }

  TempDir dir_;
  std::vector<Moments> layers_ = {random_moments(1), random_moments(2)};
  QuantizeOptions options_;
};

TEST_F(QuantizeCalibrated, EachExpertsMomentsWeighItsErrors) {
  for (const ScaleSearch search : {ScaleSearch::kMse, ScaleSearch::kSweep}) {
    const std::string out = dir_.file(to_string(search));
    options_.search = search;
    const auto result = must(quantize_checkpoint(in(), out, options_));
    for (int64_t e = 0; e < kExperts; ++e) expect_expert(out, e, layers_[1], search, true);
    EXPECT_THAT(result->notes, testing::Contains(HasSubstr("SQNR is of weights")));
  }
}

TEST_F(QuantizeCalibrated, ExpertsWithoutRowsHaveNoWeights) {
  layers_[1].rows[2] = 0;
  for (int64_t c = 0; c < kHidden; ++c) layers_[1].hidden[static_cast<size_t>(2 * kHidden + c)] = 0;
  write_moments(file(), layers_);
  const auto result = must(quantize_checkpoint(in(), dir_.file("out"), options_));
  expect_expert(dir_.file("out"), 2, layers_[1], ScaleSearch::kSweep, false);
  expect_expert(dir_.file("out"), 3, layers_[1], ScaleSearch::kSweep, true);
  EXPECT_THAT(result->notes, testing::Contains(HasSubstr("1 experts of 2 layers saw no rows")));
}

TEST_F(QuantizeCalibrated, ImatrixDatGivesTheSameBytes) {
  ASSERT_OK(quantize_checkpoint(in(), dir_.file("own"), options_));
  DatWriter dat;
  dat.number(5).entry("output.weight", {1, 2, 3});
  // The same numbers as sums instead of means, times a power of two; layer 1 with gate and up in
  // one tensor.
  for (size_t l = 0; l < 2; ++l) {
    const std::string prefix = "blk." + std::to_string(l) + ".";
    std::vector<float> hidden = layers_[l].hidden, intermediate = layers_[l].intermediate;
    for (float& value : hidden) value *= 512;
    dat.entry(prefix + (l == 0 ? "ffn_gate_exps.weight" : "ffn_gate_up_exps.weight"), hidden);
    dat.entry(prefix + "ffn_down_exps.weight", intermediate, 0);
  }
  for (const bool tail : {false, true}) {
    if (tail) dat.number(17).text("wiki.train.raw");
    dat.write(dir_.file("imatrix.dat"));
    options_.calibration = dir_.file("imatrix.dat");
    const std::string out = dir_.file(tail ? "dat_with_tail" : "dat");
    ASSERT_OK(quantize_checkpoint(in(), out, options_));
    EXPECT_EQ(read_files(out), read_files(dir_.file("own")));
  }
}

TEST_F(QuantizeCalibrated, AnotherCalibrationDoesNotResume) {
  options_.progress = [](const Progress& p) { return p.done < 8; };
  ASSERT_EQ(quantize_checkpoint(in(), dir_.file("out"), options_).status().code(),
            Code::kCancelled);
  options_.progress = {};
  QuantizeOptions without = options_;
  without.calibration.clear();
  EXPECT_THAT(quantize_checkpoint(in(), dir_.file("out"), without).status().message(),
              HasSubstr("another calibration"));
  layers_[1].hidden[5] *= 2;
  write_moments(dir_.file("changed"), layers_);
  QuantizeOptions changed = options_;
  changed.calibration = dir_.file("changed");
  EXPECT_THAT(quantize_checkpoint(in(), dir_.file("out"), changed).status().message(),
              HasSubstr("another calibration"));
  ASSERT_OK(quantize_checkpoint(in(), dir_.file("out"), options_));
  ASSERT_OK(quantize_checkpoint(in(), dir_.file("whole"), options_));
  EXPECT_EQ(read_files(dir_.file("out")), read_files(dir_.file("whole")));
}

TEST_F(QuantizeCalibrated, WrongMomentsAreRefusedByName) {
  EXPECT_EQ(refusal([](QuantizeOptions& o) { o.search = ScaleSearch::kMax; }).message(),
            "calibration: expected search mse or sweep, since max compares no errors, got max");
  write_moments(file(), {layers_[0]});
  Status status = refusal();
  EXPECT_THAT(status,
              Refused(Code::kBadInput, "expected a tensor layers.1.hidden_moments, got none"));

  const struct {
    float value;
    const char* text;
  } numbers[] = {{-1.0f, "got -1"},
                 {std::numeric_limits<float>::quiet_NaN(), "got nan"},
                 {std::numeric_limits<float>::infinity(), "got inf"}};
  for (const auto& wrong : numbers) {
    std::vector<Moments> layers = layers_;
    layers[1].intermediate[3 * kIntermediate + 9] = wrong.value;
    write_moments(file(), layers);
    status = refusal();
    EXPECT_THAT(status,
                Refused(Code::kBadInput,
                        "layers.1.intermediate_moments: expert 3 channel 9: expected a finite"));
    EXPECT_THAT(status.message(), HasSubstr(wrong.text));
  }
  std::vector<Moments> layers = layers_;
  layers[0].rows[1] = -4;
  write_moments(file(), layers);
  EXPECT_THAT(refusal().message(),
              HasSubstr("layers.0.rows: expert 1: expected a number of rows, got -4"));
}

TEST_F(QuantizeCalibrated, WrongWidthsAreRefusedByName) {
  const auto refused = [&](DType dtype, std::vector<int64_t> shape, size_t elems, int64_t counts) {
    EXPECT_OK(write_tensors(
        file(),
        {{"layers.0.rows",
          raw_tensor(DType::kI64, {counts}, std::vector<int64_t>(static_cast<size_t>(counts), 1))},
         {"layers.0.hidden_moments",
          raw_tensor(dtype, std::move(shape), std::vector<float>(elems, 1.0f))}}));
    const Status status = refusal();
    EXPECT_EQ(status.code(), Code::kBadInput);
    return status.message();
  };
  EXPECT_THAT(refused(DType::kF32, {kExperts, 64}, kExperts * 64, kExperts),
              HasSubstr("layers.0.hidden_moments: expected (4, 128) F32 of 4 experts with 128 "
                        "channels, got (4, 64) F32"));
  EXPECT_THAT(refused(DType::kF32, {8, kHidden}, 8 * kHidden, kExperts),
              HasSubstr("got (8, 128) F32"));
  EXPECT_THAT(refused(DType::kI32, {kExperts, kHidden}, kExperts * kHidden, kExperts),
              HasSubstr("got (4, 128) I32"));
  EXPECT_THAT(refused(DType::kF32, {kExperts, kHidden}, kExperts * kHidden, 5),
              HasSubstr("layers.0.rows: expected (4) I64, got (5) I64"));
}

// Cut at every byte, and with each length and count too large: the message always has one line.
ATTACK_TEST_F(kHostileFiles, QuantizeCalibrated, BrokenImatrixFilesAreRefused) {
  DatWriter whole;
  whole.number(2).entry("blk.0.ffn_gate_exps.weight", {1, 2}).entry("a", {3}).number(1).text("set");
  const auto message = [&](const std::string& bytes) {
    std::ofstream(dir_.file("i.dat"), std::ios::binary) << bytes;
    attacked();
    const Status status = refusal([&](QuantizeOptions& o) { o.calibration = dir_.file("i.dat"); });
    EXPECT_EQ(status.code(), Code::kBadInput);
    return status.message();
  };
  // chunks, length, "set": may be missing together
  const size_t tail = whole.bytes_.size() - 4 - 4 - 3;
  for (size_t cut = 0; cut < whole.bytes_.size(); ++cut) {
    const std::string said = message(whole.bytes_.substr(0, cut));
    const bool complete = cut == tail || cut == tail + 4;
    EXPECT_THAT(said, HasSubstr(complete ? "got (2) F32" : "expected")) << cut;
    EXPECT_EQ(said.find('\n'), std::string::npos);
  }
  EXPECT_THAT(message(whole.bytes_ + "x"), HasSubstr("expected an end at"));
  EXPECT_THAT(message(DatWriter().number(-1).bytes_),
              HasSubstr("number of entries at 0: expected 1 to"));
  EXPECT_THAT(message(DatWriter().number(1).number(0).bytes_ + "....."),
              HasSubstr("entry 0, name, length at 4"));
  EXPECT_THAT(message(DatWriter().number(1).text("a").number(1).number(INT32_MAX).bytes_),
              HasSubstr("entry 0, values: expected 8589934588 bytes"));
  EXPECT_THAT(message(DatWriter().number(2).entry("a", {1}).entry("a", {1}).bytes_),
              HasSubstr("expected each name once, got 'a' again"));
  EXPECT_THAT(message("not moments at all"),
              HasSubstr("expected moments of calibrate --moments, or an imatrix"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
