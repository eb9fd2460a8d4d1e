#include "verify/states.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"
#include "core/random.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {
namespace {

float uniform(uint64_t h) { return static_cast<float>(h >> 40) * 0x1p-24f; }  // [0, 1)

// Four 16-bit uniforms: bell-shaped with unit variance (4 * (2^32 - 1) / 12, whose root is 37837).
float bell(uint64_t h) {
  const uint64_t sum = (h & 0xFFFF) + (h >> 16 & 0xFFFF) + (h >> 32 & 0xFFFF) + (h >> 48);
  return (static_cast<float>(sum) - 131070.0f) * (1.0f / 37837.0f);
}

void draw_routing(const MoeOptions& o, uint64_t seed, double skipped_share, LayerStates& states) {
  const auto k = static_cast<size_t>(o.top_k);
  states.topk_ids.assign(static_cast<size_t>(states.tokens) * k, -1);
  states.topk_weights.assign(static_cast<size_t>(states.tokens) * k, 0.0f);
  // a sigmoid of its own; otherwise weights are shares of 1
  const bool on_input = o.router_weight == RouterWeight::kOnInput;
  for (int64_t t = 0; t < states.tokens; ++t) {
    int32_t* ids = states.topk_ids.data() + static_cast<size_t>(t) * k;
    float* weights = states.topk_weights.data() + static_cast<size_t>(t) * k;
    uint64_t h = mix64(seed ^ mix64(static_cast<uint64_t>(t) + 1));
    float sum = 0;
    for (size_t i = 0; i < k; ++i) {
      int32_t id = 0;
      do {  // distinct while there are experts left to choose from
        h = mix64(h);
        const float u = uniform(h);
        id = static_cast<int32_t>(u * (0.5f + 0.5f * u) * static_cast<float>(o.num_experts));
      } while (static_cast<int64_t>(i) < o.num_experts && std::find(ids, ids + i, id) != ids + i);
      ids[i] = id;
      h = mix64(h);
      weights[i] = 0.1f + uniform(h);
      sum += weights[i];
    }
    for (size_t i = 0; i < k; ++i) {
      weights[i] /= on_input ? 1.1f : sum;
      h = mix64(h);
      if (uniform(h) < skipped_share) ids[i] = -1;
    }
  }
}

struct StatesFile {
  const SafetensorsFile& file;
  std::string prefix;

  const TensorInfo* find(const std::string& what) const { return file.find(prefix + what); }
};

Status expect_shape(const std::string& path, const TensorInfo& info, int64_t first,
                    int64_t second) {
  if (info.shape.size() == 2 && (first < 0 || info.shape[0] == first) && info.shape[1] == second)
    return {};
  return bad_input(path + " " + info.name + ": expected (" +
                   (first < 0 ? "tokens" : std::to_string(first)) + ", " + std::to_string(second) +
                   "), got " + describe(info));
}

Status read_ids(const std::string& path, const StatesFile& from, const TensorInfo& info,
                const MoeOptions& o, LayerStates& states) {
  if (info.dtype != DType::kI32 && info.dtype != DType::kI64)
    return bad_input(path + " " + info.name + ": expected I32 or I64, got " +
                     to_string(info.dtype));
  std::vector<std::byte> bytes(states.topk_ids.size() * static_cast<size_t>(bits(info.dtype) / 8));
  NVFP4_MOE_TRY(from.file.read(from.file.offset(info), bytes.data(), bytes.size()));
  const std::byte* data = bytes.data();
  for (size_t i = 0; i < states.topk_ids.size(); ++i) {
    int64_t id = 0;
    if (info.dtype == DType::kI64) {
      std::memcpy(&id, data + 8 * i, 8);
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, data + 4 * i, 4);
      id = narrow;
    }
    if (id < -1 || id >= o.num_experts)
      return bad_input(path + " " + info.name + " element " + std::to_string(i) +
                       ": expected -1 to " + std::to_string(o.num_experts - 1) + ", got " +
                       std::to_string(id));
    states.topk_ids[i] = static_cast<int32_t>(id);
  }
  return {};
}

}  // namespace

Batch LayerStates::batch() const {
  Batch batch;
  batch.tokens = tokens;
  batch.hidden = hidden.data();
  batch.hidden_dtype = hidden_dtype;
  batch.topk_ids = topk_ids.data();
  batch.ids_dtype = DType::kI32;
  batch.topk_weights = topk_weights.data();
  return batch;
}

LayerStates seeded_states(const MoeOptions& o, int64_t layer, const StatesOptions& options) {
  LayerStates states;
  states.tokens = options.tokens;
  states.hidden_dtype = DType::kBf16;
  states.source = "seeded(" + std::to_string(options.seed) + ")";
  const uint64_t seed = mix64(options.seed + mix64(static_cast<uint64_t>(layer)));
  const auto hidden = static_cast<size_t>(o.hidden_size);
  std::vector<float> gain(hidden);
  for (size_t c = 0; c < hidden; ++c) {
    const uint64_t h = mix64(seed ^ (c * 0xD1342543DE82EF95ull));
    gain[c] = (0.5f + uniform(h)) * options.amplitude;
    if ((h & 127) == 0) gain[c] *= 8.0f + 16.0f * uniform(mix64(h));
  }
  states.hidden.resize(static_cast<size_t>(states.tokens) * hidden * 2);
  for (size_t t = 0; t < static_cast<size_t>(states.tokens); ++t) {
    const uint64_t row = mix64(seed + 0x51ED27ull + t);
    for (size_t c = 0; c < hidden; ++c) {
      const uint16_t bits = bf16_from_float(bell(mix64(row + c)) * gain[c]);
      std::memcpy(states.hidden.data() + (t * hidden + c) * 2, &bits, 2);
    }
  }
  draw_routing(o, seed, options.skipped_share, states);
  return states;
}

Result<LayerStates> load_states(const std::string& path, const MoeOptions& o, int64_t layer,
                                const StatesOptions& options) {
  NVFP4_MOE_ASSIGN(const SafetensorsFile file, SafetensorsFile::open(path));
  StatesFile from{file, "layers." + std::to_string(layer) + "."};
  const TensorInfo* hidden = from.find("hidden");
  if (hidden == nullptr) {
    from.prefix.clear();
    hidden = from.find("hidden");
  }
  if (hidden == nullptr)
    return bad_input(path + ": expected a tensor layers." + std::to_string(layer) +
                     ".hidden or hidden, found neither");
  NVFP4_MOE_TRY(expect_shape(path, *hidden, -1, o.hidden_size));
  if (!is_activation(hidden->dtype))
    return bad_input(path + " " + hidden->name + ": expected BF16, F16 or F32, got " +
                     to_string(hidden->dtype));

  LayerStates states;
  const int64_t file_tokens = hidden->shape[0];
  states.tokens = options.tokens == 0 ? file_tokens : std::min(options.tokens, file_tokens);
  states.hidden_dtype = hidden->dtype;
  states.source = path + " " + hidden->name;
  const auto bytes = static_cast<size_t>(states.tokens * o.hidden_size * bits(hidden->dtype) / 8);
  states.hidden.resize(bytes);
  NVFP4_MOE_TRY(file.read(file.offset(*hidden), states.hidden.data(), bytes));

  draw_routing(o, mix64(options.seed + mix64(static_cast<uint64_t>(layer))), options.skipped_share,
               states);
  if (const TensorInfo* ids = from.find("topk_ids")) {
    NVFP4_MOE_TRY(expect_shape(path, *ids, file_tokens, o.top_k));
    NVFP4_MOE_TRY(read_ids(path, from, *ids, o, states));
    states.ids_from_file = true;
  }
  if (const TensorInfo* weights = from.find("topk_weights")) {
    NVFP4_MOE_TRY(expect_shape(path, *weights, file_tokens, o.top_k));
    if (weights->dtype != DType::kF32)
      return bad_input(path + " " + weights->name + ": expected F32, got " +
                       to_string(weights->dtype));
    NVFP4_MOE_TRY(file.read(file.offset(*weights), states.topk_weights.data(),
                            states.topk_weights.size() * sizeof(float)));
    states.weights_from_file = true;
  }
  return states;
}

}  // namespace nvfp4_moe::internal
