// The half-step criterion on trial: every correctly rounded quantizer passes, in the operation
// orders that producers use, and every planted fault fails at its coordinate.
#include "verify/verify_original.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

struct Quantized {
  int64_t rows = 64, cols = 256;
  std::vector<float> w;
  std::vector<uint8_t> codes, scales;
  float s = 1;

  Nvfp4View view() const {
    return Nvfp4View::contiguous(codes.data(), scales.data(), s, rows, cols);
  }
  OriginalRows original() const {
    return [this](int64_t r, float* out) { std::copy_n(w.data() + r * cols, cols, out); };
  }
  OriginalComparison compare() const {
    return compare_with_original(view(), original(), serial_executor());
  }
  void set_code(int64_t r, int64_t c, uint8_t code) {
    uint8_t& byte = codes[static_cast<size_t>(r * cols / 2 + c / 2)];
    byte = c % 2 == 0 ? pack_codes(code, high_code(byte)) : pack_codes(low_code(byte), code);
  }
  uint8_t code(int64_t r, int64_t c) const {
    const uint8_t byte = codes[static_cast<size_t>(r * cols / 2 + c / 2)];
    return c % 2 == 0 ? low_code(byte) : high_code(byte);
  }
};

// Has room for codes and scales of these weights; the tensor scale follows from the largest weight.
Quantized unquantized(std::vector<float> w, int64_t rows = 64) {
  Quantized q;
  q.rows = rows;
  q.s = tensor_scale_from_amax(row_amax(w));
  q.w = std::move(w);
  q.codes.resize(q.w.size() / 2);
  q.scales.resize(q.w.size() / 16);
  return q;
}

std::string said(const OriginalComparison& c) {
  const WeightPlace at = c.first_failure();
  return "(" + std::to_string(at.row) + ", " + std::to_string(at.col) + "): expected " +
         at.expected + ", got " + at.actual;
}

enum class Data { kNormal, kHeavyTails, kWideBlocks, kBf16Grid, kWithZeros };

std::vector<float> draw(Data data, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> w(count);
  float block = 1;
  for (size_t i = 0; i < count; ++i) {
    if (i % 16 == 0) block = std::exp2(normal(random) * 6);
    float x = normal(random);
    switch (data) {
      case Data::kNormal: break;
      case Data::kHeavyTails: x = x * x * x; break;
      case Data::kWideBlocks:
        x *= block;
        break;  // scales over many octaves: subnormal and zero ones too
      case Data::kBf16Grid:
        x = static_cast<float>(static_cast<int>(x * 8)) / 16;
        break;  // many exact ties
      case Data::kWithZeros: x = i / 16 % 3 == 0 ? 0 : x; break;
    }
    w[i] = bf16_to_float(bf16_from_float(x * 0.02f));
  }
  return w;
}

// A producer's block scale and quotient, all in fp32 as written.
struct Producer {
  const char* name;
  float tensor_max = 2688.0f;  // s = amax / this
  float (*scale)(float amax, float s);
  float (*quotient)(float x, float v, float s);
  float lowest_scale = 0;
  float zero_block_scale = 0;
};

const Producer kProducers[] = {
    {"exact", 2688.0f,
     [](float a, float s) { return static_cast<float>(double{a} / (6.0 * double{s})); },
     [](float x, float v, float s) {
       return static_cast<float>(double{x} / (double{v} * double{s}));
     },
     0, 0},
    {"modelopt", 2688.0f, [](float a, float s) { return a / (6.0f * s); },
     [](float x, float v, float s) { return x / (v * s); }, 0x1p-9f, 1.0f},
    {"modelopt 4/6 range", 1536.0f,
     [](float a, float s) { return a / 6.0f * 256.0f / (s * 1536.0f / 6.0f); },
     [](float x, float v, float s) { return x / (v * s); }, 0x1p-9f, 1.0f},
    {"vllm", 2688.0f, [](float a, float s) { return 1.0f / s * (a * (1.0f / 6.0f)); },
     [](float x, float v, float s) { return x * (1.0f / (v * (1.0f / (1.0f / s)))); }, 0, 0},
    {"transformer-engine", 2688.0f, [](float a, float s) { return a * (1.0f / s * (1.0f / 6.0f)); },
     [](float x, float v, float s) {
       return x * std::min(1.0f / (v * (1.0f / (1.0f / s))), 3.4e38f);
     },
     0, 0},
    {"torchao", 2688.0f, [](float a, float s) { return a / 6.0f / s; },
     [](float x, float v, float s) { return x * (1.0f / s / v); }, 0x1p-6f, 0x1p-6f},
    {"compressed-tensors", 2688.0f, [](float a, float s) { return 1.0f / s * (a / 6.0f); },
     [](float x, float v, float s) { return x / (v / (1.0f / s)); }, 0, 0.125f},
    {"compressed-tensors, amax/6 in bf16", 2688.0f,
     [](float a, float s) { return 1.0f / s * bf16_to_float(bf16_from_float(a / 6.0f)); },
     [](float x, float v, float s) { return x / (v / (1.0f / s)); }, 0, 0.125f},
};

// Codes of a block under a scale byte; keeps them if their squared error is below `best`.
template <class Quotient>
void try_scale(Quantized& q, size_t block, uint8_t byte, double& best, Quotient quotient) {
  const float v = e4m3_to_float(byte);
  uint8_t codes[16] = {};
  double error = 0;
  for (size_t i = 0; i < 16; ++i) {
    const float x = q.w[block * 16 + i];
    if (v != 0) codes[i] = quotient(x, v);
    error += std::pow(double{x} - double{e2m1_to_float(codes[i])} * double{v} * double{q.s}, 2);
  }
  if (error >= best) return;
  best = error;
  q.scales[block] = byte;
  for (size_t i = 0; i < 8; ++i)
    q.codes[block * 8 + i] = pack_codes(codes[2 * i], codes[2 * i + 1]);
}

// four_over_six: blocks are scaled to 4 instead of 6 if that has the smaller squared error (4/6).
// Otherwise the largest |w| decides.
Quantized produce(const Producer& p, Data data, uint32_t seed, bool four_over_six) {
  Quantized q = unquantized(draw(data, 64 * 256, seed));
  q.s = row_amax(q.w) / p.tensor_max;
  for (size_t b = 0; b < q.scales.size(); ++b) {
    const float block_amax = row_amax({q.w.data() + b * 16, 16});
    double best = 1e300;
    for (const float stretch : {1.0f, 1.5f}) {
      if (stretch != 1.0f && !four_over_six) continue;
      const float scale = block_amax == 0
                              ? p.zero_block_scale
                              : std::max(p.scale(block_amax, q.s) * stretch, p.lowest_scale);
      try_scale(q, b, e4m3_from_float(scale), best,
                [&](float x, float v) { return e2m1_from_float(p.quotient(x, v, q.s)); });
    }
  }
  return q;
}

constexpr Data kAllData[] = {Data::kNormal, Data::kHeavyTails, Data::kWideBlocks, Data::kBf16Grid,
                             Data::kWithZeros};

TEST(HalfStep, EveryProducersQuantizerPasses) {
  for (const Producer& p : kProducers) {
    for (const Data data : kAllData) {
      for (const bool four_over_six : {false, true}) {
        const Quantized q = produce(p, data, 7, four_over_six);
        const OriginalComparison c = q.compare();
        SCOPED_TRACE(testing::Message() << p.name << " data " << static_cast<int>(data) << " 4/6 "
                                        << four_over_six << ": " << said(c));
        EXPECT_EQ(c.failures(), 0u);
        EXPECT_EQ(c.broken, 0u);
        EXPECT_EQ(c.near_ties, 0u) << "fp32 stays within the slack";
        EXPECT_EQ(c.weights, q.w.size());
      }
    }
  }
}

TEST(HalfStep, OurQuantizersPass) {
  using S = ScaleSearch;
  for (const auto& [search, weighted] :
       {std::pair(S::kMax, false), {S::kSweep, false}, {S::kMse, true}, {S::kSweep, true}}) {
    for (const Data data : kAllData) {
      Quantized q = unquantized(draw(data, 64 * 256, 11));
      // Every other column, including outliers, has weight 0.
      std::vector<float> weights(weighted ? static_cast<size_t>(q.cols) : 0);
      for (size_t c = 0; c < weights.size(); c += 2) weights[c] = static_cast<float>(c % 13);
      QuantizeCounts counts;
      double sum_sq = 0, sum_sq_error = 0;
      ASSERT_OK(quantize_weights(q.w, q.rows, q.cols, q.s, search, q.codes.data(), q.scales.data(),
                                 counts, &sum_sq, &sum_sq_error, weights));
      const OriginalComparison c = q.compare();
      EXPECT_EQ(c.failures(), 0u) << search << ": " << said(c);
      // by more than the slack: s itself is rounded, so that A = 2688 s holds only approximately
      uint64_t beyond_six = 0;
      for (size_t i = 0; i < q.w.size(); ++i) {
        const double u = double{e4m3_to_float(q.scales[i / 16])} * double{q.s};
        beyond_six += u > 0 && std::fabs(double{q.w[i]}) > 6 * u * (1 + 0x1p-21);
      }
      EXPECT_EQ(c.saturated, beyond_six);
      EXPECT_LE(beyond_six, counts.saturated_codes);
      EXPECT_NEAR(c.sqnr_db(), 10 * std::log10(sum_sq / sum_sq_error), 1e-9);
      EXPECT_EQ(c.zeroed_blocks == 0, counts.zero_scales == 0);
    }
  }
}

// A full search over all 126 scales clips if that pays; only the squared error explains it.
TEST(HalfStep, AFullSweepOfScalesPasses) {
  Quantized q = unquantized(draw(Data::kHeavyTails, 16 * 256, 5), 16);
  for (size_t b = 0; b < q.scales.size(); ++b) {
    double best = 1e300;
    for (int byte = 1; byte < 0x7F; ++byte)
      try_scale(q, b, static_cast<uint8_t>(byte), best, [&](float x, float v) {
        return e2m1_from_double(double{x} / (double{v} * double{q.s}));
      });
  }
  const OriginalComparison c = q.compare();
  EXPECT_EQ(c.failures(), 0u) << said(c);
  EXPECT_GT(c.clipped_blocks, 0u) << "the sweep never clipped: this test shows nothing";
}

// A producer that divides in bf16: counted, and accepted in numbers; a single such weight is a
// fault.
TEST(HalfStep, Bf16DivisionIsToldApart) {
  Quantized q = unquantized(draw(Data::kNormal, 64 * 256, 3));
  const auto bf16 = [](float x) { return bf16_to_float(bf16_from_float(x)); };
  QuantizeCounts counts;
  ASSERT_OK(quantize_weights(q.w, q.rows, q.cols, q.s, ScaleSearch::kMax, q.codes.data(),
                             q.scales.data(), counts));
  const Quantized exact = q;
  for (int64_t r = 0; r < q.rows; ++r) {
    for (int64_t c = 0; c < q.cols; ++c) {
      const float unit =
          bf16(e4m3_to_float(q.scales[static_cast<size_t>((r * q.cols + c) / 16)]) * q.s);
      q.set_code(r, c, e2m1_from_float(bf16(q.w[static_cast<size_t>(r * q.cols + c)] / unit)));
    }
  }
  const OriginalComparison all = q.compare();
  EXPECT_EQ(all.broken, 0u);
  EXPECT_GT(all.near_ties, all.weights / 4096);
  EXPECT_EQ(all.failures(), 0u);

  Quantized one = exact;  // apply the bf16 result to a single one of them
  for (int64_t i = 0, taken = 0; taken == 0; ++i) {
    const int64_t r = i / q.cols, c = i % q.cols;
    if ((q.code(r, c) & 7) == (exact.code(r, c) & 7)) continue;
    one.set_code(r, c, q.code(r, c));
    taken = 1;
    const OriginalComparison single = one.compare();
    EXPECT_EQ(single.near_ties, 1u);
    EXPECT_EQ(single.failures(), 1u);
    EXPECT_EQ(single.first_failure().row, r);
    EXPECT_EQ(single.first_failure().col, c);
  }
}

class PlantedFault : public ::testing::Test {
 protected:
  void SetUp() override {
    q_ = produce(kProducers[0], Data::kNormal, 21, false);
    ASSERT_EQ(q_.compare().failures(), 0u);
  }
  void expect_found_at(int64_t row, int64_t col) {
    const OriginalComparison c = q_.compare();
    EXPECT_GT(c.failures(), 0u);
    EXPECT_EQ(c.first_failure().row, row);
    EXPECT_EQ(c.first_failure().col, col);
    EXPECT_FALSE(c.first_failure().expected.empty());
  }
  Quantized q_;
};

// Every code changed to any other value is a fault, except -0 for 0.
TEST_F(PlantedFault, AnyOtherCode) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 400; ++trial) {
    const auto r = static_cast<int64_t>(random() % 64), c = static_cast<int64_t>(random() % 256);
    const uint8_t was = q_.code(r, c), now = random() & 15;
    if (now == was) continue;
    q_.set_code(r, c, now);
    if ((was & 7) == 0 && (now & 7) == 0) {
      EXPECT_EQ(q_.compare().failures(), 0u);
    } else {
      expect_found_at(r, c);
    }
    q_.set_code(r, c, was);
  }
}

TEST_F(PlantedFault, BlockScaleTimesTwoOrHalf) {
  for (const size_t block : {size_t{0}, size_t{17}, size_t{1023}}) {
    const uint8_t was = q_.scales[block];
    for (const int step : {8, -8}) {  // one exponent up or down
      const int moved = was + step;
      if (moved < 1 || moved > 0x7E) continue;
      q_.scales[block] = static_cast<uint8_t>(moved);
      const OriginalComparison c = q_.compare();
      EXPECT_GT(c.failures(), 0u) << block << " " << step;
      EXPECT_EQ(c.first_failure().row, static_cast<int64_t>(block) / 16);
      EXPECT_EQ(c.first_failure().col / 16, static_cast<int64_t>(block) % 16);
    }
    q_.scales[block] = was;
  }
}

TEST_F(PlantedFault, ZeroScaleOverRealWeights) {
  q_.scales[5] = 0;
  const OriginalComparison c = q_.compare();
  EXPECT_EQ(c.broken, 1u);
  EXPECT_EQ(c.first_failure().row, 0);
  EXPECT_EQ(c.first_failure().col / 16, 5);
  EXPECT_EQ(c.zeroed_blocks, 1u);
}

TEST_F(PlantedFault, InvalidScalesAndNonFiniteWeights) {
  for (const uint8_t scale : {kE4m3Nan, uint8_t{0x80 | 0x38}}) {
    const uint8_t was = q_.scales[3];
    q_.scales[3] = scale;
    EXPECT_GT(q_.compare().failures(), 0u);
    q_.scales[3] = was;
  }
  const float s = q_.s;
  for (const float wrong : {1.0f / s, s * 2, s / 2, -s, 0.0f, std::nanf(""), INFINITY}) {
    q_.s = wrong;
    EXPECT_GT(q_.compare().failures(), 0u) << wrong;
  }
  q_.s = s;
  q_.w[300] = std::nanf("");
  expect_found_at(1, 44);
}

TEST_F(PlantedFault, LikenessTellsWhatItIs) {
  EXPECT_GT(likeness(q_.view(), q_.original()).cosine, 0.98);
  EXPECT_NEAR(likeness(q_.view(), q_.original()).norm_ratio, 1.0, 0.02);
  const Quantized other = produce(kProducers[0], Data::kNormal, 22, false);
  EXPECT_LT(std::fabs(likeness(q_.view(), other.original()).cosine), 0.1);
  q_ = produce(kProducers[0], Data::kWideBlocks, 23, false);
  std::vector<uint8_t> turned(q_.scales.size());
  for (int64_t r = 0; r < 64; ++r)
    for (int64_t b = 0; b < 16; ++b)
      turned[static_cast<size_t>(b * 64 + r)] = q_.scales[static_cast<size_t>(r * 16 + b)];
  q_.scales = turned;
  EXPECT_GT(q_.compare().failures(), 0u);
  EXPECT_GT(likeness_transposed_scales(q_.view(), q_.original()).cosine, 0.98);
  EXPECT_LT(likeness(q_.view(), q_.original()).cosine, 0.9);
}

TEST(HalfStep, ThreadsChangeNothing) {
  const Quantized q = produce(kProducers[0], Data::kHeavyTails, 9, true);
  const auto pool = make_thread_pool(4);
  const OriginalComparison a = q.compare(),
                           b = compare_with_original(q.view(), q.original(), *pool);
  EXPECT_EQ(a.sum_sq_error, b.sum_sq_error);
  EXPECT_EQ(a.max_row, b.max_row);
  EXPECT_EQ(a.saturated, b.saturated);
}

}  // namespace
}  // namespace nvfp4_moe::internal
