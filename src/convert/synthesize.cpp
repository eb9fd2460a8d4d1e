// A tensor's values are a function of only (seed, tensor name, row, column): one 64-bit hash per
// element. Four 14-bit uniforms of it add up to a bell of unit variance. Its other byte makes one
// element in 256 three times as large (heavy tails). Row gains (0.5 .. 2) and column gains (0.5 ..
// 2, one column in 64 four times that) give the spread across blocks that real matrices have.
// Long because it writes a whole model: config, tokenizer, dense weights, experts.
#include "convert/synthesize.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>
#include <vector>

#include "core/float_formats.h"
#include "core/random.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

uint64_t hash_name(uint64_t seed, const std::string& name) {  // FNV-1a, started from the seed
  uint64_t h = mix64(seed) ^ 0xCBF29CE484222325ull;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return mix64(h);
}

// In [0, 1), 24 bits.
float uniform(uint64_t h) { return static_cast<float>(h >> 40) * 0x1p-24f; }

// Four sums of 14 bits: mean 2 * 16383, variance 4 * (2^28 - 1) / 12.
float bell(uint64_t h) {
  const uint64_t sum = (h & 0x3FFF) + (h >> 14 & 0x3FFF) + (h >> 28 & 0x3FFF) + (h >> 42 & 0x3FFF);
  // 9459 = sqrt of that variance
  const float value = (static_cast<float>(sum) - 32766.0f) * (1.0f / 9459.0f);
  return (h >> 56) == 0 ? value * 3.0f : value;
}

float gain(uint64_t h) {
  const float u = uniform(h);
  return 0.5f + 1.5f * u * u;
}

struct Spec {
  TensorInfo info;
  float deviation = 1.0f;  // of a bell-shaped matrix
  enum class Kind { kMatrix, kOnes, kIds } kind = Kind::kMatrix;
  int64_t ids_below = 0;  // kIds: I32 in [0, ids_below)
  bool routed_expert = false;
};

int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t d : shape) count *= d;
  return count;
}

void put(DType dtype, float value, std::byte* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::kF16 ? fp16_from_float(value) : bf16_from_float(value);
  std::memcpy(out, &half, 2);
}

// Writes rows [begin, end) of the tensor as bytes to out.
void fill_rows(const Spec& spec, uint64_t tensor_hash, const std::vector<float>& col_gain,
               int64_t begin, int64_t end, std::byte* out) {
  const int64_t cols = static_cast<int64_t>(col_gain.size());
  const DType dtype = spec.info.dtype;
  const int64_t elem_bytes = bits(dtype) / 8;
  for (int64_t r = begin; r < end; ++r) {
    const uint64_t row_hash = mix64(tensor_hash + static_cast<uint64_t>(r));
    const float row_gain = gain(row_hash) * spec.deviation;
    for (int64_t c = 0; c < cols; ++c, out += elem_bytes) {
      const uint64_t h = mix64(row_hash + static_cast<uint64_t>(c) + 1);
      if (spec.kind == Spec::Kind::kIds) {
        const auto id = static_cast<int32_t>(h % static_cast<uint64_t>(spec.ids_below));
        std::memcpy(out, &id, 4);
      } else {
        put(dtype,
            spec.kind == Spec::Kind::kOnes ? 1.0f
                                           : bell(h) * row_gain * col_gain[static_cast<size_t>(c)],
            out);
      }
    }
  }
}

Status write_tensor(const Spec& spec, uint64_t seed, Executor& executor,
                    std::vector<std::byte>& buffer, ShardedWriter& writer) {
  const int64_t cols = spec.info.shape.back();
  const int64_t rows = count_of(spec.info.shape) / cols;
  const uint64_t tensor_hash = hash_name(seed, spec.info.name);
  std::vector<float> col_gain(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) {
    const uint64_t h = mix64(tensor_hash ^ (static_cast<uint64_t>(c) * 0xD1342543DE82EF95ull));
    col_gain[static_cast<size_t>(c)] = gain(h) * ((h & 63) == 0 ? 4.0f : 1.0f);
  }
  const int64_t row_bytes = cols * bits(spec.info.dtype) / 8;
  const int64_t rows_at_once = std::max<int64_t>(1, (16 << 20) / row_bytes);
  for (int64_t first = 0; first < rows; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, rows - first);
    buffer.resize(static_cast<size_t>(count * row_bytes));
    executor.parallel_for(count, std::max<int64_t>(1, count / 64), [&](int64_t begin, int64_t end) {
      fill_rows(spec, tensor_hash, col_gain, first + begin, first + end,
                buffer.data() + begin * row_bytes);
    });
    NVFP4_MOE_TRY(writer.write(spec.info.name, buffer));
  }
  return {};
}

// The tensors of a model in file order: embeddings, layer by layer, head.
class Shape {
 public:
  explicit Shape(const SynthesizeOptions& o) : o_(o) {}

  std::vector<Spec> tensors() {
    if (o_.family == "nemotron_h") return nemotron();
    const bool v4 = o_.family == "deepseek_v4";
    const std::string root = v4 ? "" : "model.";
    matrix(v4 ? "embed.weight" : "model.embed_tokens.weight", {o_.vocab_size, o_.hidden_size}, 1.0f,
           DType::kBf16);
    for (int64_t l = 0; l < o_.layers; ++l)
      layer(root + "layers." + std::to_string(l) + ".", l, v4);
    ones(root + "norm.weight", {o_.hidden_size});
    matrix(v4 ? "head.weight" : "lm_head.weight", {o_.vocab_size, o_.hidden_size},
           fan_in(o_.hidden_size), DType::kBf16);
    return std::move(specs_);
  }

  // The first layer is routed by token id, like V4's first layers.
  static int64_t hash_layers(const SynthesizeOptions& o) { return std::min<int64_t>(1, o.layers); }
  // The size of the shared expert in units of the routed ones' size, as in Nemotron-3.
  static constexpr int64_t kNemotronShared = 2;

 private:
  static float fan_in(int64_t k) { return 1.0f / std::sqrt(static_cast<float>(k)); }

  void add(Spec spec, std::string name, std::vector<int64_t> shape, DType dtype) {
    spec.info.name = std::move(name);
    spec.info.shape = std::move(shape);
    spec.info.dtype = dtype;
    specs_.push_back(std::move(spec));
  }
  void matrix(std::string name, std::vector<int64_t> shape, float deviation, DType dtype,
              bool routed = false) {
    Spec spec;
    spec.deviation = deviation;
    spec.routed_expert = routed;
    add(spec, std::move(name), std::move(shape), dtype);
  }
  void ones(std::string name, std::vector<int64_t> shape) {
    Spec spec;
    spec.kind = Spec::Kind::kOnes;
    add(spec, std::move(name), std::move(shape), DType::kBf16);
  }

  void expert(const std::string& prefix, bool v4, DType dtype, bool routed) {
    const int64_t h = o_.hidden_size, i = o_.intermediate_size;
    matrix(prefix + (v4 ? "w1" : "gate_proj") + ".weight", {i, h}, fan_in(h), dtype, routed);
    matrix(prefix + (v4 ? "w2" : "down_proj") + ".weight", {h, i}, fan_in(i), dtype, routed);
    matrix(prefix + (v4 ? "w3" : "up_proj") + ".weight", {i, h}, fan_in(h), dtype, routed);
  }

  void layer(const std::string& prefix, int64_t l, bool v4) {
    const int64_t h = o_.hidden_size, lora = std::max<int64_t>(16, h / 4);
    if (v4) {
      ones(prefix + "attn_norm.weight", {h});
      matrix(prefix + "attn.wq_a.weight", {lora, h}, fan_in(h), DType::kBf16);
      ones(prefix + "attn.q_norm.weight", {lora});
      matrix(prefix + "attn.wq_b.weight", {h, lora}, fan_in(lora), DType::kBf16);
      matrix(prefix + "attn.wkv.weight", {lora, h}, fan_in(h), DType::kBf16);
      matrix(prefix + "attn.attn_sink", {16}, 1.0f, DType::kF32);
      ones(prefix + "ffn_norm.weight", {h});
      matrix(prefix + "ffn.gate.weight", {o_.num_experts, h}, fan_in(h), DType::kBf16);
      if (l < hash_layers(o_)) {
        Spec ids;
        ids.kind = Spec::Kind::kIds;
        ids.ids_below = o_.num_experts;
        add(ids, prefix + "ffn.gate.tid2eid", {o_.vocab_size, o_.top_k}, DType::kI32);
      } else {
        matrix(prefix + "ffn.gate.bias", {o_.num_experts}, 0.01f, DType::kF32);
      }
      expert(prefix + "ffn.shared_experts.", true, DType::kBf16, false);
    } else {
      ones(prefix + "input_layernorm.weight", {h});
      for (const char* p : {"q_proj", "k_proj", "v_proj", "o_proj"})
        matrix(prefix + "self_attn." + p + ".weight", {h, h}, fan_in(h), DType::kBf16);
      ones(prefix + "post_attention_layernorm.weight", {h});
      matrix(prefix + "mlp.gate.weight", {o_.num_experts, h}, fan_in(h), DType::kBf16);
    }
    for (int64_t e = 0; e < o_.num_experts; ++e)
      expert(prefix + (v4 ? "ffn" : "mlp") + ".experts." + std::to_string(e) + ".", v4, o_.dtype,
             true);
  }

  std::vector<Spec> nemotron() {
    const int64_t h = o_.hidden_size, width = o_.latent_size > 0 ? o_.latent_size : h;
    const auto pair = [&](const std::string& prefix, int64_t hidden, int64_t inner, DType dtype,
                          bool routed) {
      matrix(prefix + "up_proj.weight", {inner, hidden}, fan_in(hidden), dtype, routed);
      matrix(prefix + "down_proj.weight", {hidden, inner}, fan_in(inner), dtype, routed);
    };
    matrix("backbone.embeddings.weight", {o_.vocab_size, h}, 1.0f, DType::kBf16);
    for (int64_t l = 0; l < 2 * o_.layers; ++l) {
      const std::string prefix = "backbone.layers." + std::to_string(l) + ".",
                        mixer = prefix + "mixer.";
      ones(prefix + "norm.weight", {h});
      if (l % 2 == 0) {
        matrix(mixer + "in_proj.weight", {2 * h, h}, fan_in(h), DType::kBf16);
        matrix(mixer + "out_proj.weight", {h, 2 * h}, fan_in(2 * h), DType::kBf16);
        continue;
      }
      matrix(mixer + "gate.weight", {o_.num_experts, h}, fan_in(h), DType::kBf16);
      matrix(mixer + "gate.e_score_correction_bias", {o_.num_experts}, 0.01f, DType::kF32);
      if (o_.latent_size > 0) {
        matrix(mixer + "fc1_latent_proj.weight", {width, h}, fan_in(h), DType::kBf16);
        matrix(mixer + "fc2_latent_proj.weight", {h, width}, fan_in(width), DType::kBf16);
      }
      pair(mixer + "shared_experts.", h, kNemotronShared * o_.intermediate_size, DType::kBf16,
           false);
      for (int64_t e = 0; e < o_.num_experts; ++e)
        pair(mixer + "experts." + std::to_string(e) + ".", width, o_.intermediate_size, o_.dtype,
             true);
    }
    ones("backbone.norm_f.weight", {h});
    matrix("lm_head.weight", {o_.vocab_size, h}, fan_in(h), DType::kBf16);
    return std::move(specs_);
  }

  const SynthesizeOptions& o_;
  std::vector<Spec> specs_;
};

Json config_json(const SynthesizeOptions& o) {
  const char* dtype = o.dtype == DType::kF16   ? "float16"
                      : o.dtype == DType::kF32 ? "float32"
                                               : "bfloat16";
  if (o.family == "deepseek_v4") {
    return Json{{"architectures", {"DeepseekV4ForCausalLM"}},
                {"model_type", "deepseek_v4"},
                {"hidden_act", "silu"},
                {"hidden_size", o.hidden_size},
                {"moe_intermediate_size", o.intermediate_size},
                {"n_routed_experts", o.num_experts},
                {"n_shared_experts", 1},
                {"num_experts_per_tok", o.top_k},
                {"norm_topk_prob", true},
                {"num_hidden_layers", o.layers},
                {"num_hash_layers", Shape::hash_layers(o)},
                {"num_nextn_predict_layers", 0},
                {"num_attention_heads", 16},
                {"num_key_value_heads", 1},
                {"q_lora_rank", std::max<int64_t>(16, o.hidden_size / 4)},
                {"rms_norm_eps", 1e-6},
                {"routed_scaling_factor", 1.5},
                {"scoring_func", "sqrtsoftplus"},
                {"topk_method", "noaux_tc"},
                {"swiglu_limit", 10.0},
                {"tie_word_embeddings", false},
                {"torch_dtype", dtype},
                {"vocab_size", o.vocab_size}};
  }
  if (o.family == "nemotron_h") {
    std::string pattern;
    for (int64_t l = 0; l < o.layers; ++l) pattern += "ME";
    return Json{
        {"architectures", {"NemotronHForCausalLM"}},
        {"model_type", "nemotron_h"},
        {"hybrid_override_pattern", pattern},
        {"num_hidden_layers", 2 * o.layers},
        {"mlp_hidden_act", "relu2"},
        {"hidden_size", o.hidden_size},
        {"moe_latent_size", o.latent_size > 0 ? Json(o.latent_size) : Json(nullptr)},
        {"moe_intermediate_size", o.intermediate_size},
        {"moe_shared_expert_intermediate_size", Shape::kNemotronShared * o.intermediate_size},
        {"n_routed_experts", o.num_experts},
        {"n_shared_experts", 1},
        {"num_experts_per_tok", o.top_k},
        {"n_group", 1},
        {"topk_group", 1},
        {"norm_topk_prob", true},
        {"routed_scaling_factor", 2.5},
        {"tie_word_embeddings", false},
        {"torch_dtype", dtype},
        {"vocab_size", o.vocab_size}};
  }
  return Json{{"architectures", {"Qwen3MoeForCausalLM"}},
              {"model_type", "qwen3_moe"},
              {"decoder_sparse_step", 1},
              {"mlp_only_layers", Json::array()},
              {"hidden_act", "silu"},
              {"hidden_size", o.hidden_size},
              {"intermediate_size", 4 * o.intermediate_size},
              {"moe_intermediate_size", o.intermediate_size},
              {"num_experts", o.num_experts},
              {"num_experts_per_tok", o.top_k},
              {"norm_topk_prob", true},
              {"num_hidden_layers", o.layers},
              {"num_attention_heads", 16},
              {"num_key_value_heads", 16},
              {"head_dim", o.hidden_size / 16},
              {"rms_norm_eps", 1e-6},
              {"tie_word_embeddings", false},
              {"torch_dtype", dtype},
              {"vocab_size", o.vocab_size}};
}

Status check(const SynthesizeOptions& o) {
  if (o.family != "deepseek_v4" && o.family != "qwen3_moe" && o.family != "nemotron_h")
    return invalid_argument("family: expected deepseek_v4, qwen3_moe or nemotron_h, got " +
                            o.family);
  if (o.latent_size != 0 &&
      (o.family != "nemotron_h" || o.latent_size % 16 != 0 || o.latent_size < 0))
    return invalid_argument(
        "latent_size: expected 0, or a multiple of 16 with family nemotron_h, got " +
        std::to_string(o.latent_size));
  if (!is_activation(o.dtype))
    return invalid_argument(std::string("dtype: expected BF16, F16 or F32, got ") +
                            to_string(o.dtype));
  const std::pair<const char*, int64_t> sizes[] = {{"layers", o.layers},
                                                   {"num_experts", o.num_experts},
                                                   {"top_k", o.top_k},
                                                   {"hidden_size", o.hidden_size},
                                                   {"intermediate_size", o.intermediate_size},
                                                   {"vocab_size", o.vocab_size}};
  for (const auto& [name, value] : sizes) {
    if (value < 1 || value > 1 << 20)
      return invalid_argument(std::string(name) + ": expected 1 to 1048576, got " +
                              std::to_string(value));
  }
  if (o.hidden_size % 16 != 0 || o.intermediate_size % 16 != 0)
    return invalid_argument("hidden_size and intermediate_size: expected multiples of 16, got " +
                            std::to_string(o.hidden_size) + " and " +
                            std::to_string(o.intermediate_size));
  if (o.top_k > o.num_experts)
    return invalid_argument("top_k: expected at most num_experts = " +
                            std::to_string(o.num_experts) + ", got " + std::to_string(o.top_k));
  return {};
}

}  // namespace

SynthesizeOptions SynthesizeOptions::of_size(uint64_t total_bytes) {
  SynthesizeOptions o;
  o.hidden_size = 2048;
  o.intermediate_size = 1024;
  o.num_experts = 40;
  const uint64_t layer_bytes = 40ull * 3 * 2048 * 1024 * 2;
  o.layers =
      static_cast<int64_t>(std::max<uint64_t>(1, (total_bytes + layer_bytes / 2) / layer_bytes));
  o.max_shard_bytes = 1ull << 30;
  return o;
}

Result<SynthesizeResult> synthesize_checkpoint(const std::string& out,
                                               const SynthesizeOptions& options) {
  NVFP4_MOE_TRY(check(options));
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  NVFP4_MOE_TRY(make_directories(out));
  NVFP4_MOE_ASSIGN(const std::vector<std::string> names, list_directory(out));
  for (const std::string& name : names) {
    if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") ||
        name == "config.json")
      return invalid_argument(out + ": expected a directory without a checkpoint, found " + name +
                              "; choose another name");
  }

  std::vector<Spec> specs = Shape(options).tensors();
  std::vector<TensorInfo> infos;
  SynthesizeResult result;
  for (const Spec& spec : specs) {
    const auto bytes = static_cast<uint64_t>(count_of(spec.info.shape) * bits(spec.info.dtype) / 8);
    infos.push_back(spec.info);
    infos.back().end = bytes;
    result.bytes += bytes;
    if (spec.routed_expert) result.expert_bytes += bytes;
  }
  result.tensors = static_cast<int64_t>(specs.size());

  Executor& executor = options.executor == nullptr ? serial_executor() : *options.executor;
  NVFP4_MOE_ASSIGN(ShardedWriter writer,
                   ShardedWriter::create(out, infos, options.max_shard_bytes, {{"format", "pt"}}));
  std::vector<std::byte> buffer;
  uint64_t done_bytes = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    NVFP4_MOE_TRY(write_tensor(specs[i], options.seed, executor, buffer, writer));
    done_bytes +=
        static_cast<uint64_t>(count_of(specs[i].info.shape) * bits(specs[i].info.dtype) / 8);
    if (options.progress &&
        !options.progress({"synthesize", specs[i].info.name, static_cast<int64_t>(i + 1),
                           result.tensors, static_cast<int64_t>(done_bytes),
                           static_cast<int64_t>(result.bytes), seconds()}))
      return Status(Code::kCancelled, "synthesize: cancelled at " + specs[i].info.name);
  }
  NVFP4_MOE_TRY(writer.finish());
  result.shards = static_cast<int64_t>(writer.shards());
  NVFP4_MOE_TRY(write_text_file((fs::path(out) / "config.json").string(),
                                config_json(options).dump(2) + "\n"));
  result.seconds = seconds();
  return result;
}

}  // namespace nvfp4_moe::internal
