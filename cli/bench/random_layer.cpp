#include "cli/bench/random_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/float_formats.h"
#include "core/random.h"

namespace nvfp4_moe::internal::cli {
namespace {

uint64_t mixed(uint64_t seed, uint64_t a, uint64_t b) { return mix64(mix64(seed ^ mix64(a)) + b); }

// The root mean square of a uniformly random E2M1 code is 2.93.
constexpr double kCodeRms = 2.93;

Nvfp4View random_matrix(LoadedExpert& expert, uint64_t seed, int64_t rows, int64_t cols) {
  Random random(seed);
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(rows * cols / kBlockElems));
  // cols is a multiple of 16, so codes fill whole words.
  for (size_t i = 0; i < codes.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random.next();
    std::memcpy(codes.data() + i, &word, sizeof word);
  }
  for (size_t i = 0; i < scales.size(); i += sizeof(uint64_t)) {
    uint64_t word = random.next();
    for (size_t j = i; j < std::min(i + sizeof(uint64_t), scales.size()); ++j, word >>= 8) {
      scales[j] = static_cast<uint8_t>(0x34 + (word & 7));  // E4M3: 0x34 = 0.75 ... 0x3B = 1.375
    }
  }
  const auto tensor_scale =
      static_cast<float>(1.0 / (kCodeRms * std::sqrt(static_cast<double>(cols))));
  const Nvfp4View view =
      Nvfp4View::contiguous(codes.data(), scales.data(), tensor_scale, rows, cols);
  // Moving a vector does not move its elements.
  expert.storage.push_back(std::move(codes));
  expert.storage.push_back(std::move(scales));
  return view;
}

LoadedExpert random_expert(uint64_t seed, int64_t id, const MoeOptions& options,
                           int64_t intermediate) {
  const int64_t hidden = options.hidden_size;
  LoadedExpert expert;
  const auto key = static_cast<uint64_t>(id);
  if (has_gate(options.activation))
    expert.source.gate = random_matrix(expert, mixed(seed, key, 0), intermediate, hidden);
  expert.source.up = random_matrix(expert, mixed(seed, key, 1), intermediate, hidden);
  expert.source.down = random_matrix(expert, mixed(seed, key, 2), hidden, intermediate);
  // gate and up scales differ on purpose: that is legal, and a backend must not merge them.
  expert.source.up.tensor_scale *= 1.25f;
  return expert;
}

}  // namespace

LayerSource random_layer(const MoeOptions& options, uint64_t seed) {
  LayerSource source;
  source.expert = [=](int64_t id) -> Result<LoadedExpert> {
    return random_expert(seed, id, options, options.intermediate_size);
  };
  if (options.shared_intermediate_size > 0) {
    source.shared_expert = [=]() -> Result<LoadedExpert> {
      return random_expert(seed, -1, options, options.shared_intermediate_size);
    };
  }
  // The input scales that calibration would measure: amax/2688 for an amax of about 4 and 16.
  source.scales.hidden = 4.0f / static_cast<float>(kNvfp4Range);
  source.scales.intermediate = 16.0f / static_cast<float>(kNvfp4Range);
  return source;
}

Batch RandomTokens::batch() {
  Batch batch;
  batch.tokens = tokens;
  batch.hidden = hidden.data();
  batch.topk_ids = ids.data();
  batch.topk_weights = weights.data();
  batch.out = out.data();
  return batch;
}

std::vector<float> RandomTokens::out_floats() const {
  std::vector<float> floats;
  for (const uint16_t value : out) floats.push_back(bf16_to_float(value));
  return floats;
}

RandomTokens random_tokens(const MoeOptions& options, const ExpertRange& range, int64_t tokens,
                           uint64_t seed) {
  Random random(mixed(seed, 0x746F6B656E73u, static_cast<uint64_t>(tokens)));
  RandomTokens made;
  made.tokens = tokens;
  const auto hidden_elems = static_cast<size_t>(tokens * options.hidden_size);
  made.hidden.resize(hidden_elems);
  made.out.resize(hidden_elems);
  for (uint16_t& value : made.hidden) value = bf16_from_double(random.normal());

  std::vector<int64_t> experts(static_cast<size_t>(range.count));
  std::iota(experts.begin(), experts.end(), range.first);
  for (int64_t t = 0; t < tokens; ++t) {
    float sum = 0;
    std::vector<float> weights;
    for (int64_t k = 0; k < options.top_k; ++k) {
      // A partial Fisher-Yates shuffle; if the range is smaller than top_k, ids repeat, which is
      // legal.
      const auto at = static_cast<size_t>(k % range.count);
      const size_t pick = at + static_cast<size_t>(random.next() % (experts.size() - at));
      std::swap(experts[at], experts[pick]);
      made.ids.push_back(static_cast<int32_t>(experts[at]));
      weights.push_back(0.1f + static_cast<float>(random.uniform()));
      sum += weights.back();
    }
    for (const float weight : weights) made.weights.push_back(weight / sum);
  }
  return made;
}

}  // namespace nvfp4_moe::internal::cli
