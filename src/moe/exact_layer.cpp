#include "moe/exact_layer.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/float_formats.h"
#include "core/random.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint8_t kCodeOf1 = 2, kCodeOf3 = 5, kSign = 8;
constexpr uint8_t kScaleOf1 = 0x38, kScaleOf2 = 0x40;

// How many weights of a row may be other than 0, so that its sums stay exact; 0: all. For gate and
// up they are counted in pairs.
struct Weights {
  int64_t pairs = 0, down = 0;
  bool small = false;  // at most 1, under block scales of 1
};
Weights weights_of(const MoeConfig& config) {
  if (config->activation_format == ActivationFormat::kFp8) return {64, 16, true};
  if (config->activation == Activation::kSitu) return {0, 1024, false};
  return {};
}

// A matrix of zeros with random block scales of 1 and 2.
class Matrix {
 public:
  Matrix(Nvfp4Buffers& buffers, int64_t rows, int64_t cols, const Weights& weights, Random& random)
      : codes_(buffers.codes), scales_(buffers.block_scales), cols_(cols) {
    codes_.assign(static_cast<size_t>(rows * cols / 2), 0);
    scales_.assign(static_cast<size_t>(rows * cols / 16), kScaleOf1);
    if (weights.small) return;
    for (size_t i = 0; i < scales_.size(); i += 64) {
      uint64_t bits = random.next();
      for (size_t j = i; j < std::min(i + 64, scales_.size()); ++j, bits >>= 1)
        if ((bits & 1) != 0) scales_[j] = kScaleOf2;
    }
  }
  void set(int64_t row, int64_t col, uint8_t code) {
    uint8_t& pair = codes_[static_cast<size_t>((row * cols_ + col) / 2)];
    pair = col % 2 == 0 ? static_cast<uint8_t>((pair & 0xF0) | code)
                        : static_cast<uint8_t>((pair & 0x0F) | code << 4);
  }
  // Random bytes, each mapped by `byte_of`.
  template <class ByteOf>
  void fill(Random& random, const ByteOf& byte_of) {
    for (size_t i = 0; i < codes_.size(); i += 8) {
      uint64_t bits = random.next();
      for (size_t j = i; j < std::min(i + 8, codes_.size()); ++j, bits >>= 8)
        codes_[j] = byte_of(static_cast<uint8_t>(bits));
    }
  }
  // Both columns of a pair, under a block scale of 1.
  void set_pair(int64_t row, int64_t pair, uint8_t code, uint8_t second_code) {
    set(row, 2 * pair, code);
    set(row, 2 * pair + 1, second_code);
  }
  void put_alone(int64_t row, int64_t pair, uint8_t code) {
    set_pair(row, pair, code, code);
    scales_[static_cast<size_t>((row * cols_ + 2 * pair) / 16)] = kScaleOf1;
  }

 private:
  std::vector<uint8_t>& codes_;
  std::vector<uint8_t>& scales_;
  int64_t cols_;
};

// Calls body(i) for `count` of [0, size), evenly spread and shifted from row to row, so that the
// rows together use all.
template <class Body>
void for_some(int64_t row, int64_t size, int64_t count, const Body& body) {
  const int64_t most = std::min(count, size);
  for (int64_t i = 0; i < most; ++i) {
    const int64_t first = i * size / most, length = (i + 1) * size / most - first;
    body(first + (row + 7 * i) % length);
  }
}

uint8_t signed_code(uint8_t magnitude, Random& random) {
  return static_cast<uint8_t>(magnitude | (random.below(2) == 0 ? 0 : kSign));
}

// Pairs (w, -w) that cancel, and in each row one pair of `alone` that does not.
template <class PairOfRow>
void fill_with_pairs(Nvfp4Buffers& buffers, int64_t rows, int64_t cols, const Weights& weights,
                     Random& random, uint8_t alone, const PairOfRow& pair_of_row) {
  Matrix matrix(buffers, rows, cols, weights, random);
  if (weights.pairs == 0)
    matrix.fill(random, [](uint8_t byte) {
      return static_cast<uint8_t>((byte & 0x0F) | ((byte & 0x0F) ^ kSign) << 4);
    });
  for (int64_t row = 0; row < rows; ++row) {
    for_some(row, cols / 2, weights.pairs, [&](int64_t pair) {
      const uint8_t code = signed_code(static_cast<uint8_t>(1 + random.below(kCodeOf1)), random);
      matrix.set_pair(row, pair, code, code ^ kSign);
    });
    matrix.put_alone(row, pair_of_row(row), alone);
  }
}

// Multiples of `step`: 1 to `most`, of either sign.
void fill_biases(std::vector<float>& biases, int64_t size, int64_t most, float step,
                 Random& random) {
  for (int64_t i = 0; i < size; ++i) {
    const float value = step * static_cast<float>(1 + random.below(most));
    biases.push_back(random.below(2) == 0 ? value : -value);
  }
}

}  // namespace

MoeOptions exact_options(const ExactSizes& sizes, ActivationFormat format, Activation activation,
                         bool batch_invariant) {
  MoeOptions options;
  options.num_experts = sizes.experts;
  options.top_k = sizes.top_k;
  options.hidden_size = sizes.hidden;
  options.intermediate_size = sizes.intermediate;
  options.activation = activation;
  options.activation_format = format;
  options.batch_invariant = batch_invariant;
  options.row_format = RowFormat::kFp32;
  if (has_swiglu_limit(activation)) options.swiglu_limit = 48.0f;
  if (activation == Activation::kSitu)
    options.situ_gate_limit = 64.0f, options.situ_up_limit = 0.5f;
  return options;
}

std::vector<ExpertBuffers> exact_experts(const MoeConfig& config, uint64_t seed) {
  const Weights weights = weights_of(config);
  const int64_t hidden = config->hidden_size;
  // Clamped functions have up values of 4 to 96, beyond their limit. Otherwise up's scale is so far
  // below gate's that a gate under up's scale is no longer equal to its SiLU: g u alone would not
  // show scales that are exchanged.
  const float up_scale = has_swiglu_limit(config->activation) ? 4.0f : 0x1p-5f;
  const auto routed = static_cast<size_t>(config->num_experts);
  std::vector<ExpertBuffers> experts(routed + (config->shared_intermediate_size > 0 ? 1 : 0));
  Random random(seed);
  for (size_t e = 0; e < experts.size(); ++e) {
    ExpertBuffers& expert = experts[e];
    const int64_t inner = e < routed ? config->intermediate_size : config->shared_intermediate_size;
    const float power = static_cast<float>(1 + e % 2);
    expert.scales = {1.0f, up_scale, 0.25f * power};
    if (has_gate(config->activation)) {
      expert.scales.gate = power;
      // 2 x 3 x the 6 of every token's first two columns
      fill_with_pairs(expert.gate, inner, hidden, weights, random, kCodeOf3,
                      [](int64_t) { return 0; });
    }
    fill_with_pairs(expert.up, inner, hidden, weights, random, kCodeOf1,
                    [hidden](int64_t row) { return 1 + row % (hidden / 2 - 1); });
    Matrix down(expert.down, hidden, inner, weights, random);
    if (weights.down == 0) down.fill(random, [](uint8_t byte) { return byte; });
    for (int64_t row = 0; row < hidden; ++row)
      for_some(row, inner, weights.down, [&](int64_t col) {
        const auto any = static_cast<uint8_t>(1 + random.below(7));
        down.set(row, col, signed_code(weights.small ? kCodeOf1 : any, random));
      });
    if (config->expert_biases && e < routed) {
      if (has_gate(config->activation))
        for (int64_t i = 0; i < inner; ++i)
          expert.gate_bias.push_back(random.below(2) == 0 ? 4.0f : 12.0f);
      fill_biases(expert.up_bias, inner, 2, up_scale, random);
      fill_biases(expert.down_bias, hidden, 7, 64 * up_scale, random);
    }
  }
  return experts;
}

ExactBatch exact_batch(const MoeConfig& config, std::vector<int32_t> topk_ids, uint64_t seed) {
  const bool narrow = config->activation_format == ActivationFormat::kFp8;
  ExactBatch batch;
  batch.tokens = static_cast<int64_t>(topk_ids.size()) / config->top_k;
  batch.topk_ids = std::move(topk_ids);
  Random random(seed);
  batch.hidden.reserve(static_cast<size_t>(batch.tokens * config->hidden_size));
  for (int64_t t = 0; t < batch.tokens; ++t)
    for (int64_t block = 0; block < config->hidden_size / 16; ++block) {
      uint64_t bits = random.next();
      const float power = block == 0 || narrow ? 1.0f : static_cast<float>(1 + bits % 2);
      // a 6 in each block: its scale is then a power of two
      for (int64_t pair = 0; pair < 8; ++pair) {
        bits >>= 4;
        auto code = static_cast<uint8_t>(bits % 16);
        if (narrow) code |= 4;  // 2, 3, 4 or 6
        const float value = pair == 0 ? kE2m1Max : e2m1_to_float(code);
        batch.hidden.insert(batch.hidden.end(), 2, bf16_from_float(value * power));
      }
    }
  for (size_t i = 0; i < batch.topk_ids.size(); ++i)
    batch.topk_weights.push_back(random.below(2) == 0 ? 0.5f : 0.25f);
  return batch;
}

std::vector<int32_t> ids_of_rows(const std::vector<int64_t>& rows, int64_t top_k) {
  const int64_t assignments = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const int64_t tokens =
      std::max((assignments + top_k - 1) / top_k, *std::max_element(rows.begin(), rows.end()));
  // A step without a common divisor with the tokens visits each of them once.
  int64_t step = tokens * 5 / 8 + 1;
  while (std::gcd(step, tokens) != 1) ++step;
  std::vector<int32_t> ids(static_cast<size_t>(tokens * top_k), -1);
  int64_t next = 0;
  for (size_t e = 0; e < rows.size(); ++e)
    for (int64_t i = 0; i < rows[e]; ++i, ++next)
      ids[static_cast<size_t>(next * step % tokens * top_k + next / tokens)] =
          static_cast<int32_t>(e);
  return ids;
}

}  // namespace nvfp4_moe::internal
