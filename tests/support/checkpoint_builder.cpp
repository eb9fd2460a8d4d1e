// Long because it writes every family and format by itself and shares nothing with the code that it
// tests.
#include "support/checkpoint_builder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <stdexcept>

#include "core/csf.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal::test {
namespace {

using nlohmann::json;

// Sum of four uniforms: close enough to normal, and the same on every platform.
class Noise {
 public:
  explicit Noise(uint64_t seed) : engine_(seed) {}
  float normal() {
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(engine_() >> 11) * 0x1p-53 - 0.5;
    return static_cast<float>(sum * 1.7320508075688772);
  }
  uint64_t bits() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

template <class T>
std::vector<uint8_t> bytes_of(const T& value) {
  std::vector<uint8_t> out(sizeof(T));
  std::memcpy(out.data(), &value, sizeof(T));
  return out;
}

void append(std::vector<uint8_t>& to, const std::vector<uint8_t>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

std::vector<uint8_t> float_bytes(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> out;
  for (const float value : values) {
    if (dtype == DType::kF32) append(out, bytes_of(value));
    if (dtype == DType::kBf16) append(out, bytes_of(bf16_from_float(value)));
    if (dtype == DType::kF16) append(out, bytes_of(fp16_from_float(value)));
  }
  return out;
}

float rounded_to(float value, DType dtype) {
  if (dtype == DType::kBf16) return bf16_to_float(bf16_from_float(value));
  if (dtype == DType::kF16) return fp16_to_float(fp16_from_float(value));
  return value;
}

// (rows, cols) elements of `size` bytes to (cols, rows).
std::vector<uint8_t> transposed(const std::vector<uint8_t>& in, int64_t rows, int64_t cols,
                                int64_t size) {
  std::vector<uint8_t> out(in.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      std::memcpy(out.data() + (c * rows + r) * size, in.data() + (r * cols + c) * size,
                  static_cast<size_t>(size));
  return out;
}

std::string key_of(int64_t layer, int64_t expert, const std::string& projection) {
  return std::to_string(layer) + "/" + std::to_string(expert) + "/" + projection;
}

void quantize(BuiltMatrix& m) {
  QuantizeCounts counts;
  const Status status =
      quantize_weights(m.weights, m.rows, m.cols, m.tensor_scale, ScaleSearch::kMax, m.codes.data(),
                       m.scales.data(), counts);
  if (!status.ok()) throw std::runtime_error(status.message());
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

}  // namespace

struct CheckpointBuilder::Names {
  const char *model_type, *prefix, *block;
  const char* shared;               // nullptr: no shared expert
  const char* text_type = nullptr;  // nullptr: flat config; else the type in text_config
  bool w_words = false;
  bool k_first = false;  // of stacked tensors
};

const CheckpointBuilder::Names& CheckpointBuilder::names() const {
  constexpr const char *kLanguage = "language_model.model.", *kModel = "model.language_model.";
  static const Names table[] = {
      {"deepseek_v3", "model.", "mlp", "shared_experts"},
      {"deepseek_v4", "", "ffn", "shared_experts", nullptr, true},
      {"kimi_k2", "model.", "mlp", "shared_experts"},
      {"kimi_k25", kLanguage, "mlp", "shared_experts", "deepseek_v3"},
      {"qwen2_moe", "model.", "mlp", "shared_expert"},
      {"qwen3_moe", "model.", "mlp", nullptr},
      {"qwen3_next", "model.", "mlp", "shared_expert"},
      {"qwen3_5_moe", kModel, "mlp", "shared_expert", "qwen3_5_moe_text"},
      {"glm4_moe", "model.", "mlp", "shared_experts"},
      {"glm5_next", kModel, "mlp", "shared_experts", "glm5_next_text"},
      {"minimax_m2", "model.", "block_sparse_moe", nullptr, nullptr, true},
      {"minimax_m3", kLanguage, "block_sparse_moe", nullptr, "minimax_m3_vl_text", true},
      {"mixtral", "model.", "block_sparse_moe", nullptr, nullptr, true},
      {"llama4", kLanguage, "feed_forward", "shared_expert", "llama4_text", false, true},
      {"motif", "model.", "moe", nullptr},
  };
  for (const Names& row : table)
    if (options_.model_type == row.model_type) return row;
  throw std::invalid_argument("no model type " + options_.model_type);
}

bool CheckpointBuilder::stacked() const {
  return options_.format == SourceFormat::kModelOptStacked || options_.stacked_floats;
}
bool CheckpointBuilder::has_shared() const { return names().shared != nullptr; }

CheckpointBuilder::CheckpointBuilder(const BuilderOptions& options) : options_(options) {
  const std::string& type = options_.model_type;
  const bool first_dense =
      type == "deepseek_v3" || type.starts_with("kimi") || type.starts_with("glm");
  for (int64_t l = 0; l < options_.layers; ++l) layers_.push_back(l + (first_dense ? 1 : 0));
  make_config();
  generate();
}

void CheckpointBuilder::make_config() {
  const Names& row = names();
  const std::string& type = options_.model_type;
  const int64_t all_layers = layers_.back() + 1;
  json text = {{"hidden_size", options_.hidden_size},
               {"num_hidden_layers", all_layers},
               {"num_experts_per_tok", options_.top_k},
               {"hidden_act", "silu"},
               {"vocab_size", 128}};
  const bool plain_size = type.starts_with("minimax") || type == "mixtral" || type == "llama4";
  text[plain_size ? "intermediate_size" : "moe_intermediate_size"] = options_.intermediate_size;
  if (!plain_size) text["intermediate_size"] = 4 * options_.intermediate_size;
  const bool qwen = type.starts_with("qwen");
  text[qwen         ? "num_experts"
       : plain_size ? "num_local_experts"
                    : "n_routed_experts"] = options_.num_experts;
  if (layers_.front() == 1) text["first_k_dense_replace"] = 1;
  if (type == "motif") text["first_k_dense_replace"] = 0;
  if (qwen) {
    text["decoder_sparse_step"] = 1;
    text["mlp_only_layers"] = json::array();
    if (row.shared != nullptr) text["shared_expert_intermediate_size"] = options_.intermediate_size;
  } else if (!plain_size) {
    text["n_shared_experts"] = row.shared != nullptr ? 1 : 0;
  }
  if (type == "llama4") text["interleave_moe_layer_step"] = 1;
  if (type == "llama4") text["num_experts_per_tok"] = options_.top_k = 1;
  if (type == "deepseek_v4" || type == "glm5_next") text["swiglu_limit"] = 10.0;
  if (type == "deepseek_v4") text["routed_scaling_factor"] = 1.5;
  if (type == "minimax_m3") text.update({{"swiglu_limit", 7.0}, {"swiglu_alpha", 1.702}});
  if (row.text_type == nullptr) {
    config_ = text;
    config_["model_type"] = type;
  } else {
    text["model_type"] = row.text_type;
    config_ = {
        {"model_type", type}, {"text_config", text}, {"vision_config", {{"hidden_size", 8}}}};
  }
  config_["architectures"] = {type + "_ForCausalLM"};
  hf_quant_ = json();
  const std::string algo = options_.weight_only ? "W4A16_NVFP4" : "NVFP4";
  json quantization;
  switch (options_.format) {
    case SourceFormat::kModelOpt:
    case SourceFormat::kModelOptStacked:
      if (type == "deepseek_v4") {
        quantization = json::parse(R"({"quant_method": "fp8", "weight_block_size": [128, 128],
          "quant_algo": "MIXED_PRECISION", "ignore": ["*.attn.*", "head", "mtp.*"]})");
        quantization["moe_quant_algo"] = algo;
        break;
      }
      quantization = json::parse(R"({"quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {"group_0": {"targets": ["Linear"],
          "weights": {"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16},
          "input_activations": {"dynamic": false, "num_bits": 4, "type": "float",
                                "group_size": 16}}}})");
      quantization["quant_algo"] = algo;
      if (options_.weight_only) quantization["config_groups"]["group_0"].erase("input_activations");
      if (!options_.hf_quant_config) break;
      hf_quant_ = json::parse(R"({"producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {"kv_cache_quant_algo": null, "group_size": 16,
                         "exclude_modules": ["lm_head"]}})");
      hf_quant_["quantization"]["quant_algo"] = algo;
      break;
    case SourceFormat::kCompressedTensors:
      quantization = json::parse(R"({"quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"],
          "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                      "symmetric": true, "dynamic": false, "scale_dtype": "torch.float8_e4m3fn"},
          "input_activations": {"num_bits": 4, "type": "float", "group_size": 16,
                                "dynamic": "local"}}}})");
      if (options_.weight_only)
        quantization["config_groups"]["group_0"]["input_activations"] = nullptr;
      break;
    case SourceFormat::kMxfp4:
      quantization["quant_method"] = type == "deepseek_v4" ? "fp8" : "mxfp4";
      if (type == "deepseek_v4") quantization["scale_fmt"] = "ue8m0";
      break;
    case SourceFormat::kGgufNvfp4:
    case SourceFormat::kFloat: return;
  }
  config_["quantization_config"] = quantization;
}

void CheckpointBuilder::generate() {
  Noise noise(options_.seed);
  for (const int64_t layer : layers_) {
    for (int64_t e = has_shared() ? -1 : 0; e < options_.num_experts; ++e) {
      const float input_scale = 0.01f * static_cast<float>(e + 2);
      for (const char* projection : {"gate", "up", "down"}) {
        BuiltMatrix& m = matrices_[key_of(layer, e, projection)];
        const bool down = std::string(projection) == "down";
        m.rows = down ? options_.hidden_size : options_.intermediate_size;
        m.cols = down ? options_.intermediate_size : options_.hidden_size;
        m.codes.resize(static_cast<size_t>(m.rows * m.cols / 2));
        m.input_scale = down ? 2 * input_scale : input_scale;
        if (const bool mxfp4 = options_.format == SourceFormat::kMxfp4;
            mxfp4 || options_.random_codes) {
          for (uint8_t& byte : m.codes) byte = static_cast<uint8_t>(noise.bits() >> 56);
          m.scales.resize(static_cast<size_t>(m.rows * (m.cols / (mxfp4 ? 32 : 16))));
          for (uint8_t& byte : m.scales)
            byte =
                static_cast<uint8_t>(mxfp4 ? 117 + noise.bits() % 6 : 0x50 + noise.bits() % 0x2F);
          if (!mxfp4) m.tensor_scale = 1e-4f;
          continue;
        }
        double amax = 0;
        for (int64_t i = 0; i < m.rows * m.cols; ++i) {
          const float w = rounded_to(0.05f * noise.normal() * (i % 97 == 0 ? 4.0f : 1.0f),
                                     options_.float_dtype);
          m.weights.push_back(w);
          amax = std::max(amax, std::abs(static_cast<double>(w)));
        }
        m.tensor_scale = tensor_scale_from_amax(amax);
        m.scales.resize(static_cast<size_t>(m.rows * (m.cols / 16)));
        quantize(m);
      }
      // Both producers give gate and up one scale: here the larger one, with which both are
      // quantized.
      BuiltMatrix& gate = matrix(layer, e, "gate");
      BuiltMatrix& up = matrix(layer, e, "up");
      if (options_.format == SourceFormat::kFloat || options_.format == SourceFormat::kMxfp4)
        continue;
      if (options_.random_codes) continue;
      const float both = std::max(gate.tensor_scale, up.tensor_scale);
      for (BuiltMatrix* m : {&gate, &up}) {
        m->tensor_scale = both;
        quantize(*m);
      }
    }
    if (!stacked() || options_.format == SourceFormat::kFloat) continue;
    // Stacked: gate and up share one tensor scale per expert; input scales are one per expert.
    for (int64_t e = 0; e < options_.num_experts; ++e) {
      matrix(layer, e, "up").input_scale = matrix(layer, e, "gate").input_scale;
    }
  }
}

BuiltMatrix& CheckpointBuilder::matrix(int64_t layer, int64_t expert,
                                       const std::string& projection) {
  return matrices_.at(key_of(layer, expert, projection));
}

std::string CheckpointBuilder::tensor_name(int64_t layer, int64_t expert,
                                           const std::string& projection,
                                           const std::string& part) const {
  const Names& row = names();
  const bool compressed = options_.format == SourceFormat::kCompressedTensors;
  std::string suffix = "weight";
  if (options_.format == SourceFormat::kMxfp4) {
    if (part != "codes") suffix = "scale";
  } else if (options_.format != SourceFormat::kFloat) {
    const std::map<std::string, const char*> suffixes = {
        {"codes", compressed ? "weight_packed" : "weight"},
        {"scales", "weight_scale"},
        {"tensor_scale", compressed ? "weight_global_scale" : "weight_scale_2"},
        {"input_scale", compressed ? "input_global_scale" : "input_scale"}};
    suffix = suffixes.at(part);
  }
  const std::string block =
      std::string(row.prefix) + "layers." + std::to_string(layer) + "." + row.block + ".";
  const bool down = projection == "down";
  if (stacked() && expert >= 0) {
    const std::string base = block + "experts." + (down ? "down_proj" : "gate_up_proj");
    return suffix == "weight" ? base : base + "_" + suffix;
  }
  const std::string module =
      expert < 0 ? std::string(row.shared) : "experts." + std::to_string(expert);
  const std::string word = !row.w_words           ? projection + "_proj"
                           : down                 ? "w2"
                           : projection == "gate" ? "w1"
                                                  : "w3";
  return block + module + "." + word + "." + suffix;
}

void CheckpointBuilder::render_matrix(int64_t layer, int64_t expert, const std::string& projection,
                                      const BuiltMatrix& m) {
  const auto put = [&](const std::string& part, RawTensor tensor) {
    tensors_[tensor_name(layer, expert, projection, part)] = std::move(tensor);
  };
  if (options_.format == SourceFormat::kFloat) {
    put("codes",
        {options_.float_dtype, {m.rows, m.cols}, float_bytes(m.weights, options_.float_dtype)});
    return;
  }
  if (options_.format == SourceFormat::kMxfp4) {
    put("codes", {DType::kI8, {m.rows, m.cols / 2}, m.codes});
    put("scales", {DType::kF8E8M0, {m.rows, m.cols / 32}, m.scales});
    return;
  }
  const std::vector<int64_t> scalar(options_.format == SourceFormat::kCompressedTensors ? 1 : 0, 1);
  put("codes", {DType::kU8, {m.rows, m.cols / 2}, m.codes});
  put("scales", {DType::kF8E4M3, {m.rows, m.cols / 16}, m.scales});
  put("tensor_scale", {DType::kF32, scalar, scalar_bytes(m.tensor_scale)});
  if (!options_.weight_only) put("input_scale", {DType::kF32, scalar, scalar_bytes(m.input_scale)});
}

void CheckpointBuilder::render_stacked(int64_t layer) {
  const bool floats = options_.format == SourceFormat::kFloat;
  const bool k_first = names().k_first;
  for (const char* name : {"gate", "down"}) {
    const std::string projection = name;
    RawTensor codes, scales, tensor_scales, input_scales;
    int64_t rows = 0;
    int64_t cols = 0;
    for (int64_t e = 0; e < options_.num_experts; ++e) {
      BuiltMatrix both = matrix(layer, e, projection);
      if (projection == "gate") {
        const BuiltMatrix& up = matrix(layer, e, "up");
        both.rows *= 2;
        append(both.codes, up.codes);
        append(both.scales, up.scales);
        both.weights.insert(both.weights.end(), up.weights.begin(), up.weights.end());
      }
      rows = both.rows;
      cols = both.cols;
      const int64_t size = floats ? bits(options_.float_dtype) / 8 : 1;
      const int64_t width = floats ? cols : cols / 2;
      if (floats) both.codes = float_bytes(both.weights, options_.float_dtype);
      append(codes.bytes, k_first ? transposed(both.codes, rows, width, size) : both.codes);
      append(scales.bytes, k_first ? transposed(both.scales, rows, cols / 16, 1) : both.scales);
      append(tensor_scales.bytes, bytes_of(both.tensor_scale));
      append(input_scales.bytes, bytes_of(both.input_scale));
    }
    const auto shape = [&](int64_t k) {
      return k_first ? std::vector<int64_t>{options_.num_experts, k, rows}
                     : std::vector<int64_t>{options_.num_experts, rows, k};
    };
    codes.dtype = floats ? options_.float_dtype : DType::kU8;
    codes.shape = shape(floats ? cols : cols / 2);
    tensors_[tensor_name(layer, 0, projection, "codes")] = codes;
    if (floats) continue;
    scales.dtype = DType::kF8E4M3;
    scales.shape = shape(cols / 16);
    tensor_scales.dtype = input_scales.dtype = DType::kF32;
    tensor_scales.shape = input_scales.shape = {options_.num_experts};
    tensors_[tensor_name(layer, 0, projection, "scales")] = scales;
    tensors_[tensor_name(layer, 0, projection, "tensor_scale")] = tensor_scales;
    if (!options_.weight_only)
      tensors_[tensor_name(layer, 0, projection, "input_scale")] = input_scales;
  }
}

void CheckpointBuilder::code_scales(int64_t layer, bool flat) {
  const CsfCodec codec =
      options_.format == SourceFormat::kMxfp4 ? CsfCodec::kMxfp4 : CsfCodec::kNvfp4;
  for (int64_t e = 0; e < options_.num_experts; ++e) {
    for (const char* projection : {"gate", "up", "down"}) {
      const std::string name = tensor_name(layer, e, projection, "scales");
      const RawTensor plain = std::move(tensors().extract(name).mapped());
      const int64_t rows = plain.shape[0], cols = plain.shape[1];
      CsfStreams streams = encode_csf(codec, plain.bytes, rows, cols);
      const auto size = static_cast<int64_t>(streams.fixed.size());
      std::vector<int64_t> shape = {rows / 16, size / (rows / 16)};
      if (flat) shape = {size};
      tensors_[name + std::string(csf_fixed_suffix(codec))] = {DType::kU8, std::move(shape),
                                                               std::move(streams.fixed)};
      tensors_[name + std::string(csf_exceptions_suffix(codec))] = raw_tensor(
          DType::kU32, {static_cast<int64_t>(streams.exceptions.size())}, streams.exceptions);
    }
  }
}

void CheckpointBuilder::render() {
  if (rendered_) return;
  rendered_ = true;
  const Names& row = names();
  const RawTensor vector{DType::kBf16, {8}, std::vector<uint8_t>(16)};
  for (const int64_t layer : layers_) {
    for (const char* projection : {"gate", "up", "down"}) {
      for (int64_t e = has_shared() ? -1 : 0; e < (stacked() ? 0 : options_.num_experts); ++e) {
        const BuiltMatrix& m = matrix(layer, e, projection);
        if (options_.format ==
            SourceFormat::kModelOptStacked)  // shared experts stay floats if the others are stacked
          tensors_[tensor_name(layer, e, projection, "codes")] = {
              DType::kBf16, {m.rows, m.cols}, float_bytes(m.weights, DType::kBf16)};
        else
          render_matrix(layer, e, projection, m);
      }
    }
    if (stacked()) render_stacked(layer);
    const std::string stem = std::string(row.prefix) + "layers." + std::to_string(layer) + ".";
    tensors_[stem + row.block + ".gate.weight"] = vector;
    tensors_[stem + "self_attn.q_proj.weight"] = vector;
    tensors_[stem + "input_layernorm.weight"] = vector;
  }
  tensors_[std::string(row.prefix) + "embed_tokens.weight"] = vector;
  tensors_["mtp.0.ffn.experts.0.w1.weight"] = vector;
}

std::map<std::string, RawTensor>& CheckpointBuilder::tensors() {
  render();
  return tensors_;
}

const char* to_string(Plant fault) {
  static const char* const names[] = {
      "flipped_code",          "scale_times_two",         "swapped_gate_up",
      "transposed_scales",     "reciprocal_tensor_scale", "shifted_experts",
      "missing_expert",        "missing_input_scale",     "zero_input_scale",
      "denormal_input_scale",  "infinite_input_scale",    "nan_input_scale",
      "negative_input_scale",  "one_input_scale",         "nan_block_scale",
      "negative_block_scale",  "nan_tensor_scale",        "zero_tensor_scale",
      "negative_tensor_scale", "gate_up_mismatch",        "wrong_shape",
      "wrong_dtype",           "group_size_32",           "zero_scale_over_codes",
      "all_zero_scales"};
  return names[static_cast<int>(fault)];
}

void CheckpointBuilder::plant(Plant fault, int64_t layer, int64_t expert) {
  BuiltMatrix& gate = matrix(layer, expert, "gate");
  BuiltMatrix& up = matrix(layer, expert, "up");
  BuiltMatrix& down = matrix(layer, expert, "down");
  constexpr float kInf = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  const auto raw = [&](const std::string& projection, const std::string& part) -> RawTensor& {
    return tensors().at(tensor_name(layer, expert, projection, part));
  };
  // A planted number is written unchanged, even if the format stores reciprocals.
  const auto set_scalar = [&](const std::string& projection, const std::string& part, float value) {
    RawTensor& tensor = raw(projection, part);
    const size_t at = tensor.bytes.size() > 4 ? static_cast<size_t>(expert) * 4 : 0;
    std::memcpy(tensor.bytes.data() + at, &value, 4);
  };
  const auto set_input = [&](float value) { set_scalar("down", "input_scale", value); };
  const auto set_tensor = [&](float value) { set_scalar("gate", "tensor_scale", value); };
  // The first `bytes` of up's scales, with this shape.
  const auto cut_scales = [&](int64_t rows, int64_t cols) {
    RawTensor& tensor = raw("up", "scales");
    tensor.shape = {rows, cols};
    tensor.bytes.resize(static_cast<size_t>(rows * cols));
  };
  // Takes an expert's tensors away, or gives them to the next expert.
  const auto take = [&](int64_t e, bool shift) {
    for (const char* projection : {"gate", "up", "down"}) {
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
        auto node = tensors().extract(tensor_name(layer, e, projection, part));
        if (node.empty() || !shift) continue;
        node.key() = tensor_name(layer, e + 1, projection, part);
        tensors().insert(std::move(node));
      }
    }
  };
  switch (fault) {
    case Plant::kFlippedCode: gate.codes[5] ^= 0x02; break;
    case Plant::kScaleTimesTwo: up.scales[3] = static_cast<uint8_t>(up.scales[3] + 8); break;
    case Plant::kSwappedGateUp: std::swap(gate, up); break;
    case Plant::kTransposedScales:
      down.scales = transposed(down.scales, down.rows, down.cols / 16, 1);
      if (down.rows != down.cols / 16) raw("down", "scales").shape = {down.cols / 16, down.rows};
      break;
    case Plant::kReciprocalTensorScale: down.tensor_scale = 1.0f / down.tensor_scale; break;
    case Plant::kShiftedExperts:
      for (int64_t e = options_.num_experts - 1; e >= 0; --e) take(e, true);
      return;
    case Plant::kMissingExpert: return take(expert, false);
    case Plant::kMissingInputScale:
      tensors().erase(tensor_name(layer, expert, "down", "input_scale"));
      return;
    case Plant::kZeroInputScale: return set_input(0);
    case Plant::kDenormalInputScale: return set_input(1e-40f);
    case Plant::kInfiniteInputScale: return set_input(kInf);
    case Plant::kNanInputScale: return set_input(kNan);
    case Plant::kNegativeInputScale: return set_input(-0.5f);
    case Plant::kOneInputScale: return set_input(1);
    case Plant::kNanBlockScale: up.scales[1] = 0x7F; break;
    case Plant::kNegativeBlockScale: up.scales[1] |= 0x80; break;
    case Plant::kNanTensorScale: return set_tensor(kNan);
    case Plant::kZeroTensorScale: return set_tensor(0);
    case Plant::kNegativeTensorScale: return set_tensor(-1e-4f);
    case Plant::kGateUpMismatch: up.tensor_scale *= 1.5f; break;
    case Plant::kWrongShape: return cut_scales(up.rows - 1, up.cols / 16);
    case Plant::kWrongDtype: raw("up", "scales").dtype = DType::kU8; return;
    case Plant::kGroupSize32: return cut_scales(up.rows, up.cols / 32);
    case Plant::kZeroScaleOverCodes: down.scales[2] = 0; break;
    case Plant::kAllZeroScales: std::fill(down.scales.begin(), down.scales.end(), uint8_t{0});
  }
  // If the tensors are already rendered, faults in the numbers are applied to them too.
  if (!rendered_ || stacked() || options_.format == SourceFormat::kFloat) return;
  for (const char* projection : {"gate", "up", "down"}) {
    const BuiltMatrix& m = matrix(layer, expert, projection);
    const auto update = [&](const char* part, const std::vector<uint8_t>& bytes) {
      const auto found = tensors_.find(tensor_name(layer, expert, projection, part));
      if (found != tensors_.end() && found->second.bytes.size() == bytes.size())
        found->second.bytes = bytes;
    };
    update("codes", m.codes);
    update("scales", m.scales);
    if (fault == Plant::kReciprocalTensorScale || fault == Plant::kGateUpMismatch ||
        fault == Plant::kSwappedGateUp)
      update("tensor_scale", scalar_bytes(m.tensor_scale));
  }
}

std::vector<uint8_t> CheckpointBuilder::scalar_bytes(float value) const {
  const bool inverse = options_.format == SourceFormat::kCompressedTensors;
  return bytes_of(inverse ? static_cast<float>(1.0 / static_cast<double>(value)) : value);
}

Status CheckpointBuilder::write(const std::string& directory) {
  render();
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return io_error(directory + ": " + error.message());
  write_text(std::filesystem::path(directory) / "config.json", config_.dump(1));
  if (!hf_quant_.is_null())
    write_text(std::filesystem::path(directory) / "hf_quant_config.json", hf_quant_.dump(1));
  const auto shards = static_cast<size_t>(std::max(options_.shards, 1));
  std::vector<std::map<std::string, RawTensor>> files(shards);
  json map = json::object();
  size_t next = 0;
  for (const auto& [name, tensor] : tensors_) {
    const size_t s = next++ * shards / tensors_.size();
    char file[64] = "model.safetensors";
    if (shards > 1)
      std::snprintf(file, sizeof(file), "model-%05zu-of-%05zu.safetensors", s + 1, shards);
    map[name] = file;
    files[s][name] = tensor;
  }
  for (const auto& file : files)
    NVFP4_MOE_TRY(
        write_tensors(directory + "/" + map[file.begin()->first].get<std::string>(), file));
  if (shards > 1)
    write_text(std::filesystem::path(directory) / "model.safetensors.index.json",
               json({{"metadata", json::object()}, {"weight_map", map}}).dump(1));
  return {};
}

Status write_tensors(const std::string& path, const std::map<std::string, RawTensor>& tensors) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors)
    infos.push_back({.name = name, .dtype = tensor.dtype, .shape = tensor.shape});
  NVFP4_MOE_ASSIGN(SafetensorsWriter writer, SafetensorsWriter::create(path, infos, {}));
  for (const auto& [name, tensor] : tensors)
    NVFP4_MOE_TRY(writer.write(std::as_bytes(std::span(tensor.bytes))));
  return writer.finish();
}

Opened::Opened(CheckpointBuilder& builder, const CheckpointOptions& options)
    : checkpoint_(must([&]() -> Result<Checkpoint> {
        NVFP4_MOE_TRY(builder.write(dir.path().string()));
        return Checkpoint::open(dir.path().string(), options);
      }())) {}

Status refusal_of_open(CheckpointBuilder& builder) {
  const TempDir dir;
  NVFP4_MOE_TRY(builder.write(dir.path().string()));
  return Checkpoint::open(dir.path().string()).status();
}

}  // namespace nvfp4_moe::internal::test
