// Quantizing with weighted errors. GGUF imatrices: tests/python/test_calibration.py.
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "quantize/models.h"
#include "support/attack.h"

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

// imatrix.dat as llama.cpp writes it.
struct Dat {
  std::string bytes;
  Dat& raw(const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return *this;
  }
  Dat& number(int32_t value) { return raw(&value, sizeof(value)); }
  Dat& text(const std::string& value) {
    return number(static_cast<int32_t>(value.size())).raw(value.data(), value.size());
  }
  Dat& entry(const std::string& name, const std::vector<float>& values, int32_t calls = 3) {
    text(name).number(calls).number(static_cast<int32_t>(values.size()));
    return raw(values.data(), values.size() * sizeof(float));
  }
};

class QuantizeCalibrated : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(in_, tiny_model(2, kExperts, kHidden, kIntermediate)));
    write(layers_);
    options_.search = ScaleSearch::kSweep;
    options_.calibration = file_;
  }
  void write(const std::vector<Moments>& layers) {
    std::map<std::string, RawTensor> tensors;
    for (size_t l = 0; l < layers.size(); ++l) {
      const std::string prefix = "layers." + std::to_string(l) + ".";
      tensors[prefix + "rows"] = raw_tensor(DType::kI64, {kExperts}, layers[l].rows);
      tensors[prefix + "hidden_moments"] =
          raw_tensor(DType::kF32, {kExperts, kHidden}, layers[l].hidden);
      tensors[prefix + "intermediate_moments"] =
          raw_tensor(DType::kF32, {kExperts, kIntermediate}, layers[l].intermediate);
    }
    ASSERT_OK(write_tensors(file_, tensors));
  }
  // An expert of layer 1 is quantized with its moments as weights, or without weights.
  void expect_expert(const std::string& out, int64_t expert, ScaleSearch search, bool weighted) {
    const auto weights_of = [&](const std::vector<float>& all, int64_t cols) {
      std::vector<float> weights;
      if (!weighted) return weights;
      weights.assign(all.begin() + expert * cols, all.begin() + (expert + 1) * cols);
      // A hundredth of the mean is added. Rounding in the last bits does not change the result.
      const double mean =
          std::accumulate(weights.begin(), weights.end(), 0.0) / static_cast<double>(cols);
      for (float& weight : weights)
        weight = static_cast<float>(static_cast<double>(weight) / mean + 0.01);
      return weights;
    };
    expect_quantized(in_, out, 1, expert, search, weights_of(layers_[1].hidden, kHidden),
                     weights_of(layers_[1].intermediate, kIntermediate));
  }
  Status refusal() {
    const Status status = quantize_checkpoint(in_, dir_.file("refused"), options_).status();
    EXPECT_FALSE(fs::exists(dir_.file("refused")))
        << "nothing is written before the moments are known to be right";
    return status;
  }

  TempDir dir_;
  const std::string in_ = dir_.file("in"), file_ = dir_.file("moments"), out_ = dir_.file("out");
  std::vector<Moments> layers_ = {random_moments(1), random_moments(2)};
  QuantizeOptions options_;
};

TEST_F(QuantizeCalibrated, EachExpertsMomentsWeighItsErrors) {
  layers_[1].rows[2] = 0;
  std::fill_n(layers_[1].hidden.begin() + 2 * kHidden, kHidden, 0.0f);
  write(layers_);
  for (const ScaleSearch search : {ScaleSearch::kMse, ScaleSearch::kSweep}) {
    const std::string out = dir_.file(to_string(search));
    options_.search = search;
    const auto result = must(quantize_checkpoint(in_, out, options_));
    for (int64_t e = 0; e < kExperts; ++e) expect_expert(out, e, search, e != 2);
    EXPECT_THAT(result->notes, testing::Contains(HasSubstr("SQNR is of weights")));
    EXPECT_THAT(result->notes, testing::Contains(HasSubstr("1 experts of 2 layers saw no rows")));
  }
}

TEST_F(QuantizeCalibrated, ImatrixDatGivesTheSameBytes) {
  ASSERT_OK(quantize_checkpoint(in_, dir_.file("own"), options_));
  Dat dat;
  dat.number(5).entry("output.weight", {1, 2, 3});
  // The same numbers as sums instead of means, times a power of two; layer 1 with gate and up in
  // one tensor.
  for (size_t l = 0; l < 2; ++l) {
    const std::string prefix = "blk." + std::to_string(l) + ".";
    std::vector<float> hidden = layers_[l].hidden;
    for (float& value : hidden) value *= 512;
    dat.entry(prefix + (l == 0 ? "ffn_gate_exps.weight" : "ffn_gate_up_exps.weight"), hidden);
    dat.entry(prefix + "ffn_down_exps.weight", layers_[l].intermediate, 0);
  }
  options_.calibration = dir_.file("imatrix.dat");
  for (const bool tail : {false, true}) {
    if (tail) dat.number(17).text("wiki.train.raw");
    std::ofstream(options_.calibration, std::ios::binary) << dat.bytes;
    const std::string out = dir_.file(tail ? "dat_with_tail" : "dat");
    ASSERT_OK(quantize_checkpoint(in_, out, options_));
    EXPECT_THAT(differing(read_files(out), read_files(dir_.file("own"))), IsEmpty());
  }
}

TEST_F(QuantizeCalibrated, AnotherCalibrationDoesNotResume) {
  options_.progress = [](const Progress& p) { return p.done < 8; };
  ASSERT_EQ(quantize_checkpoint(in_, out_, options_).status().code(), Code::kCancelled);
  options_.progress = {};
  QuantizeOptions without = options_;
  without.calibration.clear();
  EXPECT_THAT(quantize_checkpoint(in_, out_, without).status().message(),
              HasSubstr("another calibration"));
  std::vector<Moments> changed = layers_;
  changed[1].hidden[5] *= 2;
  write(changed);
  EXPECT_THAT(quantize_checkpoint(in_, out_, options_).status().message(),
              HasSubstr("another calibration"));
  write(layers_);
  ASSERT_OK(quantize_checkpoint(in_, out_, options_));
  ASSERT_OK(quantize_checkpoint(in_, dir_.file("whole"), options_));
  EXPECT_THAT(differing(read_files(out_), read_files(dir_.file("whole"))), IsEmpty());
}

TEST_F(QuantizeCalibrated, WrongMomentsAreRefusedByName) {
  write({layers_[0]});
  EXPECT_THAT(refusal(),
              Refused(Code::kBadInput, "expected a tensor layers.1.hidden_moments, got none"));
  for (const float wrong :
       {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<Moments> layers = layers_;
    layers[1].intermediate[3 * kIntermediate + 9] = wrong;
    write(layers);
    EXPECT_THAT(refusal(),
                Refused(Code::kBadInput,
                        "layers.1.intermediate_moments: expert 3 channel 9: expected a finite"));
  }
  std::vector<Moments> layers = layers_;
  layers[0].rows[1] = -4;
  write(layers);
  EXPECT_THAT(refusal().message(),
              HasSubstr("layers.0.rows: expert 1: expected a number of rows, got -4"));
  const struct {
    DType dtype;
    std::vector<int64_t> shape;
    int64_t rows;
    const char* words;
  } cases[] = {
      {DType::kF32,
       {kExperts, 64},
       kExperts,
       "layers.0.hidden_moments: expected (4, 128) F32 of 4 experts with 128 channels, got (4, "
       "64)"},
      {DType::kF32, {8, kHidden}, kExperts, "got (8, 128) F32"},
      {DType::kI32, {kExperts, kHidden}, kExperts, "got (4, 128) I32"},
      {DType::kF32, {kExperts, kHidden}, 5, "layers.0.rows: expected (4) I64, got (5) I64"}};
  for (const auto& [dtype, shape, rows, words] : cases) {
    const std::vector<int64_t> counts(static_cast<size_t>(rows), 1);
    const std::vector<float> values(static_cast<size_t>(shape[0] * shape[1]), 1.0f);
    ASSERT_OK(
        write_tensors(file_, {{"layers.0.rows", raw_tensor(DType::kI64, {rows}, counts)},
                              {"layers.0.hidden_moments", raw_tensor(dtype, shape, values)}}));
    EXPECT_THAT(refusal(), Refused(Code::kBadInput, words));
  }
  options_.search = ScaleSearch::kMax;
  EXPECT_EQ(refusal().message(),
            "calibration: expected search mse or sweep, since max compares no errors, got max");
}

// Cut at every byte, and with each length and count too large: the message always has one line.
ATTACK_TEST_F(kHostileFiles, QuantizeCalibrated, BrokenImatrixFilesAreRefused) {
  options_.calibration = dir_.file("i.dat");
  const auto message = [&](const std::string& bytes) {
    std::ofstream(options_.calibration, std::ios::binary) << bytes;
    attacked();
    const Status status = refusal();
    EXPECT_EQ(status.code(), Code::kBadInput);
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
    return status.message();
  };
  Dat whole;
  whole.number(2).entry("blk.0.ffn_gate_exps.weight", {1, 2}).entry("a", {3}).number(1).text("set");
  // chunks, length, "set": may be missing together
  const size_t tail = whole.bytes.size() - 4 - 4 - 3;
  for (size_t cut = 0; cut < whole.bytes.size(); ++cut) {
    const bool complete = cut == tail || cut == tail + 4;
    EXPECT_THAT(message(whole.bytes.substr(0, cut)),
                HasSubstr(complete ? "got (2) F32" : "expected"))
        << cut;
  }
  const std::pair<std::string, const char*> cases[] = {
      {whole.bytes + "x", "expected an end at"},
      {Dat().number(-1).bytes, "number of entries at 0: expected 1 to"},
      {Dat().number(1).number(0).bytes + ".....", "entry 0, name, length at 4"},
      {Dat().number(1).text("a").number(1).number(INT32_MAX).bytes,
       "entry 0, values: expected 8589934588 bytes"},
      {Dat().number(2).entry("a", {1}).entry("a", {1}).bytes,
       "expected each name once, got 'a' again"},
      {"not moments at all", "expected moments of calibrate --moments, or an imatrix"}};
  for (const auto& [bytes, words] : cases) EXPECT_THAT(message(bytes), HasSubstr(words));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
