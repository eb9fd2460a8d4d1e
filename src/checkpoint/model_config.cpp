// One row per model type says how its config spells things; everything else is read with checks.
// Long because the table of model types stands here whole.
#include "checkpoint/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "checkpoint/names.h"
#include "checkpoint/quant_config.h"
#include "safetensors/files.h"
#include "safetensors/json_strict.h"

namespace nvfp4_moe {
namespace {

using json = Json;

enum class ActRule : uint8_t { kSilu, kClamped, kOai, kGptOss, kRelu2 };
enum class LayerRule : uint8_t { kAll, kFirstDense, kSparseStep, kLlama4, kBlockTypes };
enum class SharedRule : uint8_t { kNone, kCount, kOwnSize, kMinimax, kLlama4, kNemotron };

struct ModelRow {
  std::string_view model_type;
  std::string_view family;
  const char* intermediate;  // field of the experts' intermediate size
  ActRule activation;
  LayerRule layers;
  SharedRule shared;
  RouterWeight router_weight;
  bool biases = false;  // of the experts
};

constexpr RouterWeight kAfter = RouterWeight::kAfterDown;
constexpr RouterWeight kBefore = RouterWeight::kBeforeDown;
constexpr RouterWeight kInput = RouterWeight::kOnInput;
constexpr const char* kMoe = "moe_intermediate_size";
constexpr const char* kPlain = "intermediate_size";
constexpr ModelRow kModels[] = {
    {"deepseek_v2", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"deepseek_v3", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"deepseek_v32", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"deepseek_v4", "deepseek_v4", kMoe, ActRule::kClamped, LayerRule::kAll, SharedRule::kCount, kBefore},
    {"kimi_k2", "kimi", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"kimi_k25", "kimi", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"kimi_linear", "kimi", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"qwen2_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"qwen3_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kNone, kAfter},
    {"qwen3_next", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"qwen3_5_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"qwen3_5_moe_text", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"qwen3_6_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"qwen3_6_moe_text", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"qwen3_vl_moe", "qwen_vl", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kNone, kAfter},
    {"qwen3_vl_moe_text", "qwen_vl", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kNone, kAfter},
    {"glm4_moe", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm4_moe_lite", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm4v_moe", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm4v_moe_text", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm_moe_dsa", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm5_next", "glm", kMoe, ActRule::kClamped, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm5_next_text", "glm", kMoe, ActRule::kClamped, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"minimax_m2", "minimax", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kMinimax, kAfter},
    {"minimax_m3", "minimax", kPlain, ActRule::kOai, LayerRule::kAll, SharedRule::kMinimax, kAfter},
    {"minimax_m3_vl", "minimax", kPlain, ActRule::kOai, LayerRule::kAll, SharedRule::kMinimax, kAfter},
    {"minimax_m3_vl_text", "minimax", kPlain, ActRule::kOai, LayerRule::kAll, SharedRule::kMinimax, kAfter},
    {"mixtral", "mixtral", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"llama4", "llama4", kPlain, ActRule::kSilu, LayerRule::kLlama4, SharedRule::kLlama4, kInput},
    {"llama4_text", "llama4", kPlain, ActRule::kSilu, LayerRule::kLlama4, SharedRule::kLlama4, kInput},
    {"motif", "motif", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"Motif", "motif", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"gpt_oss", "gpt_oss", kPlain, ActRule::kGptOss, LayerRule::kAll, SharedRule::kNone, kAfter, true},
    {"nemotron_h", "nemotron_h", kMoe, ActRule::kRelu2, LayerRule::kBlockTypes, SharedRule::kNemotron, kAfter},
};

struct DeclinedModel {
  std::string_view model_type;
  std::string_view reason;
};
constexpr DeclinedModel kDeclined[] = {
    {"kimi_k3", "its activation is SiTU, which is not implemented"},
};

Status missing(const char* key, std::string_view model_type) {
  return bad_input(fmt::format("config.json {}: missing, and {} needs it", key, printable(model_type)));
}

Result<int64_t> in_range(const json& value, const char* key, int64_t low, int64_t high) {
  const std::optional<int64_t> number = exact_int64(value);
  if (!number || *number < low || *number > high) {
    return bad_input(
        fmt::format("config.json {}: expected an integer in [{}, {}], got {}", key, low, high, describe_json(value)));
  }
  return *number;
}

// The first of several spellings of one field; two that disagree are an error.
Result<std::optional<int64_t>> optional_int(const json& config, std::initializer_list<const char*> keys, int64_t low,
                                            int64_t high) {
  std::optional<int64_t> out;
  const char* from = "";
  for (const char* key : keys) {
    const json* value = member(config, key);
    if (value == nullptr) continue;
    NVFP4_MOE_ASSIGN(const int64_t number, in_range(*value, key, low, high));
    if (out && *out != number) {
      return bad_input(fmt::format("config.json {}: expected {} as in {}, got {}", key, *out, from, number));
    }
    out = number;
    from = key;
  }
  return out;
}

Result<int64_t> required_int(const json& config, std::initializer_list<const char*> keys, int64_t low, int64_t high,
                             std::string_view model_type) {
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> value, optional_int(config, keys, low, high));
  if (!value) return missing(*keys.begin(), model_type);
  return *value;
}

Result<float> required_positive(const json& config, const char* key, std::string_view model_type) {
  const json* value = member(config, key);
  if (value == nullptr) return missing(key, model_type);
  const double number = value->is_number() ? value->get<double>() : std::numeric_limits<double>::quiet_NaN();
  const float rounded = static_cast<float>(number);
  if (!(rounded > 0) || !std::isfinite(rounded)) {
    return bad_input(fmt::format("config.json {}: expected a positive number, got {}", key, describe_json(*value)));
  }
  return rounded;
}

Result<std::string> model_type_of(const json& config) {
  const json* value = member(config, "model_type");
  if (value == nullptr) return std::string();
  if (!value->is_string()) {
    return bad_input(fmt::format("config.json model_type: expected a string, got {}", describe_json(*value)));
  }
  return value->get<std::string>();
}

// The part of a multimodal wrapper's config that describes the language model, else the config itself.
const json& language_config(const json& config) {
  for (const char* key : {"text_config", "language_config", "llm_config", "thinker_config"}) {
    const json* inner = member(config, key);
    if (inner != nullptr && inner->is_object()) return *inner;
  }
  return config;
}

const ModelRow* model_row(std::string_view model_type) {
  for (const ModelRow& row : kModels) {
    if (row.model_type == model_type) return &row;
  }
  return nullptr;
}

std::string known_types() {
  std::string out;
  for (const ModelRow& row : kModels) (out += out.empty() ? "" : ", ") += row.model_type;
  return out;
}

// Nemotron-H names its experts' activation beside that of its Mamba layers.
Status read_relu2(const json& config, const ModelRow& row, MoeOptions& options) {
  constexpr const char* kKey = "mlp_hidden_act";
  const json* value = member(config, kKey);
  if (value == nullptr) return missing(kKey, row.model_type);
  if (*value != json("relu2"))
    return unsupported(
        fmt::format("config.json {}: expected relu2 for {}, got {}", kKey, row.model_type, describe_json(*value)));
  options.activation = Activation::kRelu2;
  return {};
}

Status read_activation(const json& config, const ModelRow& row, MoeOptions& options) {
  if (row.activation == ActRule::kRelu2) return read_relu2(config, row, options);
  std::string act;
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const json* value = member(config, key);
    if (value == nullptr) continue;
    if (!value->is_string()) {
      return bad_input(fmt::format("config.json {}: expected a string, got {}", key, describe_json(*value)));
    }
    act = value->get<std::string>();
    break;
  }
  if (act == "situ") return unsupported("config.json hidden_act: situ (SiTU) is not implemented");
  const bool silu = act == "silu" || act == "swish";
  const bool oai = row.activation == ActRule::kOai && (act == "swigluoai" || act == "swiglu_oai");
  if (act.empty() && row.activation == ActRule::kSilu) return missing("hidden_act", row.model_type);
  if (!act.empty() && !silu && !oai) {
    return unsupported(
        fmt::format("config.json hidden_act: expected silu for {}, got '{}'", row.model_type, printable(act)));
  }
  switch (row.activation) {
    case ActRule::kSilu:
      options.activation = Activation::kSwiglu;
      for (const char* key : {"swiglu_limit", "swiglu_limits", "swiglu_alpha"}) {
        if (member(config, key) != nullptr) {
          return unsupported(
              fmt::format("config.json {}: {} is known here with plain silu(g)*u only", key, row.model_type));
        }
      }
      return {};
    case ActRule::kClamped: {
      options.activation = Activation::kSwigluClamped;
      NVFP4_MOE_ASSIGN(options.swiglu_limit, required_positive(config, "swiglu_limit", row.model_type));
      return {};
    }
    case ActRule::kOai: {
      options.activation = Activation::kSwigluOai;
      NVFP4_MOE_ASSIGN(options.swiglu_limit, required_positive(config, "swiglu_limit", row.model_type));
      NVFP4_MOE_ASSIGN(options.swiglu_alpha, required_positive(config, "swiglu_alpha", row.model_type));
      return {};
    }
    case ActRule::kRelu2: break;
    case ActRule::kGptOss: {  // both are constants of the model's code; configs name the limit alone, or none
      options.activation = Activation::kSwigluOai;
      options.swiglu_limit = 7.0f;
      if (member(config, "swiglu_limit") != nullptr) {
        NVFP4_MOE_ASSIGN(options.swiglu_limit, required_positive(config, "swiglu_limit", row.model_type));
      }
      if (member(config, "swiglu_alpha") != nullptr) {
        NVFP4_MOE_ASSIGN(options.swiglu_alpha, required_positive(config, "swiglu_alpha", row.model_type));
      }
      return {};
    }
  }
  return {};
}

// A list with one entry per layer; `is_moe` says which entries mean MoE.
template <class IsMoe>
Status layers_from_list(const json& list, const char* key, int64_t count, std::vector<int64_t>& layers, IsMoe is_moe) {
  if (!list.is_array() || static_cast<int64_t>(list.size()) < count) {
    return bad_input(fmt::format("config.json {}: expected a list of {}, got {}", key, count, describe_json(list)));
  }
  for (int64_t layer = 0; layer < count; ++layer) {
    const std::optional<bool> moe = is_moe(list[static_cast<size_t>(layer)]);
    if (!moe) {
      return bad_input(
          fmt::format("config.json {} entry {}: got {}", key, layer, describe_json(list[static_cast<size_t>(layer)])));
    }
    if (*moe) layers.push_back(layer);
  }
  return {};
}

// Numbers of layers: [3, 7, 11].
Result<std::vector<bool>> layer_set(const json* list, const char* key, int64_t count) {
  std::vector<bool> set(static_cast<size_t>(count));
  if (list == nullptr) return set;
  if (!list->is_array()) {
    return bad_input(fmt::format("config.json {}: expected a list, got {}", key, describe_json(*list)));
  }
  for (const json& entry : *list) {
    NVFP4_MOE_ASSIGN(const int64_t layer, in_range(entry, key, 0, count - 1));
    set[static_cast<size_t>(layer)] = true;
  }
  return set;
}

// Nemotron-H's layers, each a mixer of one kind: as a list of words, as one letter each, or both. Returns the words;
// nothing where the config has neither.
Result<std::vector<std::string>> block_types(const json& config) {
  std::vector<std::string> types;
  const char* from = nullptr;
  const auto check_count = [](const char* key, size_t count) -> Status {
    if (count <= static_cast<size_t>(kMaxModelLayers)) return {};
    return bad_input(fmt::format("config.json {}: expected at most {} layers, got {}", key, kMaxModelLayers, count));
  };
  const auto add = [&](const char* key, std::vector<std::string> read) -> Status {
    if (from != nullptr && read != types)
      return bad_input(fmt::format("config.json {}: expected the layers of {}", key, from));
    types = std::move(read);
    from = key;
    return {};
  };
  for (const char* key : {"layers_block_type", "layer_types"}) {
    const json* list = member(config, key);
    if (list == nullptr) continue;
    if (!list->is_array()) {
      return bad_input(fmt::format("config.json {}: expected a list, got {}", key, describe_json(*list)));
    }
    NVFP4_MOE_TRY(check_count(key, list->size()));
    std::vector<std::string> read;
    for (const json& entry : *list) {
      const std::string word = entry.is_string() ? entry.get<std::string>() : std::string();
      if (word == "moe" || word == "mlp") {
        read.push_back(word);
      } else if (word == "mamba" || word == "linear_attention") {
        read.push_back("mamba");
      } else if (word == "attention" || word == "full_attention") {
        read.push_back("attention");
      } else {
        return bad_input(fmt::format("config.json {} entry {}: got {}", key, read.size(), describe_json(entry)));
      }
    }
    NVFP4_MOE_TRY(add(key, std::move(read)));
  }
  const char* const pattern_key = "hybrid_override_pattern";
  const json* pattern = member(config, pattern_key);
  if (pattern == nullptr) return types;
  if (!pattern->is_string()) {
    return bad_input(fmt::format("config.json {}: expected a string, got {}", pattern_key, describe_json(*pattern)));
  }
  const std::string letters = pattern->get<std::string>();
  NVFP4_MOE_TRY(check_count(pattern_key, letters.size()));
  std::vector<std::string> read;
  for (const char letter : letters) {
    switch (letter) {
      case 'M': read.push_back("mamba"); break;
      case '*': read.push_back("attention"); break;
      case '-': read.push_back("mlp"); break;
      case 'E': read.push_back("moe"); break;
      default:
        return bad_input(fmt::format("config.json {}: expected M, *, - and E, got '{}'", pattern_key,
                                     printable(std::string(1, letter))));
    }
  }
  NVFP4_MOE_TRY(add(pattern_key, std::move(read)));
  return types;
}

// How many layers there are. Nemotron-3 Ultra's config has null for it, and the list alone says.
Result<int64_t> count_layers(const json& config, const ModelRow& row, std::string_view model_type) {
  if (row.layers != LayerRule::kBlockTypes)
    return required_int(config, {"num_hidden_layers"}, 1, kMaxModelLayers, model_type);
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> count, optional_int(config, {"num_hidden_layers"}, 1, kMaxModelLayers));
  NVFP4_MOE_ASSIGN(const std::vector<std::string> types, block_types(config));
  const auto listed = static_cast<int64_t>(types.size());
  if (listed == 0) return missing("layers_block_type", model_type);
  if (count.value_or(listed) == listed) return listed;
  return bad_input(fmt::format("config.json num_hidden_layers: expected the {} layers that the config lists, got {}",
                               listed, *count));
}

Status read_layers(const json& config, const ModelRow& row, int64_t count, std::vector<int64_t>& layers) {
  if (const json* types = member(config, "mlp_layer_types")) {
    return layers_from_list(*types, "mlp_layer_types", count, layers, [](const json& entry) -> std::optional<bool> {
      if (entry == "dense") return false;
      if (entry == "sparse" || entry == "moe" || entry == "hash_moe") return true;
      return std::nullopt;
    });
  }
  const json* freq = member(config, "moe_layer_freq");
  if (freq != nullptr && freq->is_array()) {
    return layers_from_list(*freq, "moe_layer_freq", count, layers, [](const json& entry) -> std::optional<bool> {
      const std::optional<int64_t> number = exact_int64(entry);
      if (!number || (*number != 0 && *number != 1)) return std::nullopt;
      return *number == 1;
    });
  }
  switch (row.layers) {
    case LayerRule::kAll:
      for (int64_t layer = 0; layer < count; ++layer) layers.push_back(layer);
      return {};
    case LayerRule::kFirstDense: {
      NVFP4_MOE_ASSIGN(const int64_t dense,
                       required_int(config, {"first_k_dense_replace"}, 0, kMaxModelLayers, row.model_type));
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> every,
                       optional_int(config, {"moe_layer_freq"}, 1, kMaxModelLayers));
      for (int64_t layer = dense; layer < count; ++layer) {
        if (layer % every.value_or(1) == 0) layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kSparseStep: {
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> step,
                       optional_int(config, {"decoder_sparse_step"}, 1, kMaxModelLayers));
      NVFP4_MOE_ASSIGN(const std::vector<bool> dense,
                       layer_set(member(config, "mlp_only_layers"), "mlp_only_layers", count));
      for (int64_t layer = 0; layer < count; ++layer) {
        if (!dense[static_cast<size_t>(layer)] && (layer + 1) % step.value_or(1) == 0) layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kBlockTypes: {
      NVFP4_MOE_ASSIGN(const std::vector<std::string> types, block_types(config));
      for (int64_t layer = 0; layer < count; ++layer) {
        if (types[static_cast<size_t>(layer)] == "moe") layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kLlama4: {
      if (const json* list = member(config, "moe_layers")) {
        NVFP4_MOE_ASSIGN(const std::vector<bool> set, layer_set(list, "moe_layers", count));
        for (int64_t layer = 0; layer < count; ++layer) {
          if (set[static_cast<size_t>(layer)]) layers.push_back(layer);
        }
        return {};
      }
      NVFP4_MOE_ASSIGN(const int64_t step,
                       required_int(config, {"interleave_moe_layer_step"}, 1, kMaxModelLayers, row.model_type));
      for (int64_t layer = step - 1; layer < count; layer += step) layers.push_back(layer);
      return {};
    }
  }
  return {};
}

Status read_shared(const json& config, const ModelRow& row, ModelInfo& out) {
  int64_t& count = out.shared_experts;
  int64_t& size = out.options.shared_intermediate_size;
  switch (row.shared) {
    case SharedRule::kNone: break;
    case SharedRule::kCount: {
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> shared,
                       optional_int(config, {"n_shared_experts", "num_shared_experts"}, 0, 1024));
      const bool null = config.contains("n_shared_experts");  // present as null: DeepSeek's way to say none
      if (!shared && !null) return missing("n_shared_experts", row.model_type);
      count = shared.value_or(0);
      size = count * out.options.intermediate_size;
      break;
    }
    case SharedRule::kOwnSize: {
      NVFP4_MOE_ASSIGN(size,
                       required_int(config, {"shared_expert_intermediate_size"}, 0, kMaxModelSize, row.model_type));
      break;
    }
    case SharedRule::kMinimax: {
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> shared,
                       optional_int(config, {"shared_intermediate_size"}, 0, kMaxModelSize));
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> number, optional_int(config, {"n_shared_experts"}, 0, 1024));
      count = shared.value_or(0) > 0 ? number.value_or(1) : 0;
      size = shared.value_or(0) * count;
      break;
    }
    case SharedRule::kLlama4: size = out.options.intermediate_size; break;
    case SharedRule::kNemotron: {  // a multiple of its own size
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> shared, optional_int(config, {"n_shared_experts"}, 0, 1024));
      if (!shared && !config.contains("n_shared_experts")) return missing("n_shared_experts", row.model_type);
      count = shared.value_or(0);
      if (count == 0) break;
      NVFP4_MOE_ASSIGN(size,
                       required_int(config, {"moe_shared_expert_intermediate_size"}, 0, kMaxModelSize, row.model_type));
      size *= count;
      break;
    }
  }
  if (count == 0 && size > 0) count = 1;
  return {};
}

// What both files declare; where both speak they must agree. hf_quant_config.json is ModelOpt's: beside a
// compressed-tensors config.json it is what that library's converter copied along from the source, and says nothing.
Result<QuantDeclaration> read_quantization(const json& config, const json& language, std::string_view hf_quant_json,
                                           std::string_view family) {
  QuantDeclaration from_config;
  const json* flat = member(config, "quantization_config");
  if (flat == nullptr) flat = member(language, "quantization_config");
  if (flat == nullptr) flat = member(config, "compression_config");  // what llm-compressor wrote before
  if (flat != nullptr) {
    Result<QuantDeclaration> parsed = parse_quantization(*flat, family);
    if (!parsed.ok()) return parsed.status().in("config.json quantization_config");
    from_config = *std::move(parsed);
  }
  if (hf_quant_json.empty() || from_config.format == SourceFormat::kCompressedTensors) return from_config;
  Result<json> root = parse_json_strict(hf_quant_json);
  if (!root.ok()) return root.status().in("hf_quant_config.json");
  const json* quantization = root->is_object() ? member(*root, "quantization") : nullptr;
  if (quantization == nullptr) return bad_input("hf_quant_config.json quantization: missing");
  Result<QuantDeclaration> parsed = parse_quantization(*quantization, family);
  if (!parsed.ok()) return parsed.status().in("hf_quant_config.json");
  QuantDeclaration from_file = *std::move(parsed);
  if (flat == nullptr) {
    if (const json* producer = member(*root, "producer"); producer != nullptr && producer->is_object()) {
      const json* name = member(*producer, "name");
      const json* version = member(*producer, "version");
      if (name != nullptr && name->is_string()) from_file.producer = name->get<std::string>();
      if (version != nullptr && version->is_string()) from_file.producer += " " + version->get<std::string>();
    }
    return from_file;
  }
  const auto same_algo = [](const auto& a, const auto& b) {
    return a.first == b.first && a.second.algo == b.second.algo;
  };
  if (from_config.algo == from_file.algo &&
      !std::equal(from_config.by_layer.begin(), from_config.by_layer.end(), from_file.by_layer.begin(),
                  from_file.by_layer.end(), same_algo)) {
    return bad_input("hf_quant_config.json quantized_layers: expected the experts' formats as in config.json");
  }
  if (from_config.algo != from_file.algo || from_config.format != from_file.format) {
    return bad_input(fmt::format("hf_quant_config.json quant_algo: expected '{}' as in config.json, got '{}'",
                                 printable(from_config.algo), printable(from_file.algo)));
  }
  return from_config;
}

}  // namespace

Result<ModelInfo> parse_model_config(std::string_view config_json, std::string_view hf_quant_json) {
  Result<json> root = parse_json_strict(config_json);
  if (!root.ok()) return root.status().in("config.json");
  if (!root->is_object()) return bad_input("config.json: expected an object, got " + describe_json(*root));
  const json& config = language_config(*root);
  NVFP4_MOE_ASSIGN(const std::string outer_type, model_type_of(*root));
  NVFP4_MOE_ASSIGN(std::string model_type, model_type_of(config));
  if (model_type.empty()) model_type = outer_type;
  if (model_type.empty()) return bad_input("config.json model_type: missing");
  for (const DeclinedModel& row : kDeclined) {
    if (row.model_type == model_type || row.model_type == outer_type) {
      return unsupported(fmt::format("config.json model_type {}: {}", row.model_type, row.reason));
    }
  }
  const ModelRow* row = model_row(model_type);
  if (row == nullptr) row = model_row(outer_type);
  if (row == nullptr) {
    return unsupported(
        fmt::format("config.json model_type '{}' is not known; known are {}", printable(model_type), known_types()));
  }

  ModelInfo out;
  out.model_type = printable(model_type);  // these strings end up in messages and tables
  // Kimi-K2 and K2.5 may call their language model deepseek_v3; the wrapper's type tells.
  const ModelRow* outer_row = model_row(outer_type);
  out.family = outer_row != nullptr ? outer_row->family : row->family;
  if (const json* list = member(*root, "architectures"); list != nullptr && list->is_array() && !list->empty()) {
    if (list->front().is_string()) out.architecture = printable(list->front().get<std::string>());
  }
  MoeOptions& options = out.options;
  NVFP4_MOE_ASSIGN(out.num_hidden_layers, count_layers(config, *row, model_type));
  NVFP4_MOE_ASSIGN(out.model_hidden_size, required_int(config, {"hidden_size"}, 1, kMaxModelSize, model_type));
  // Behind a projection the routed experts have a width of their own.
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> latent, optional_int(config, {"moe_latent_size"}, 1, kMaxModelSize));
  if (latent && row->activation != ActRule::kRelu2)
    return unsupported(
        fmt::format("config.json moe_latent_size: experts behind a projection are known of nemotron_h alone, not of {}",
                    printable(model_type)));
  options.hidden_size = latent.value_or(out.model_hidden_size);
  NVFP4_MOE_ASSIGN(options.intermediate_size, required_int(config, {row->intermediate}, 1, kMaxModelSize, model_type));
  NVFP4_MOE_ASSIGN(options.num_experts, required_int(config, {"n_routed_experts", "num_experts", "num_local_experts"},
                                                     1, kMaxModelExperts, model_type));
  NVFP4_MOE_ASSIGN(
      const std::optional<int64_t> top_k,
      optional_int(config, {"num_experts_per_tok", "num_experts_per_token", "moe_topk"}, 1, kMaxModelExperts));
  if (top_k) {
    options.top_k = *top_k;
  } else {  // last, since generation settings also use this word
    NVFP4_MOE_ASSIGN(const std::optional<int64_t> plain, optional_int(config, {"top_k"}, 1, kMaxModelExperts));
    if (!plain) return missing("num_experts_per_tok", model_type);
    options.top_k = *plain;
  }
  if (options.top_k > options.num_experts) {
    return bad_input(fmt::format("config.json num_experts_per_tok: expected at most the {} experts, got {}",
                                 options.num_experts, options.top_k));
  }
  options.router_weight = row->router_weight;
  options.expert_biases = row->biases;
  if (row->router_weight == RouterWeight::kBeforeDown) {
    // Weights are normalised and then scaled by this factor, so that it bounds each of them.
    NVFP4_MOE_ASSIGN(options.max_router_weight, required_positive(config, "routed_scaling_factor", model_type));
  }
  NVFP4_MOE_TRY(read_activation(config, *row, options));
  NVFP4_MOE_TRY(read_layers(config, *row, out.num_hidden_layers, out.layers));
  NVFP4_MOE_TRY(read_shared(config, *row, out));
  if (out.layers.empty()) return bad_input("config.json: no layer of the model is an MoE layer");
  if (row->router_weight == RouterWeight::kOnInput && options.top_k != 1) {
    return unsupported(
        fmt::format("config.json num_experts_per_tok: {} multiplies hidden by the router weight before gemm1, which "
                    "this library offers for one expert per token only, got {}",
                    printable(model_type), options.top_k));
  }

  NVFP4_MOE_ASSIGN(const QuantDeclaration quantization, read_quantization(*root, config, hf_quant_json, out.family));
  out.format = quantization.format;
  out.quant_method = printable(quantization.method);
  out.quant_algo = quantization.algo;
  out.producer = printable(quantization.producer);
  options.activation_format = quantization.activation_format;
  out.layer_quantizations = quantization.by_layer;
  out.shared_activation_format = quantization.shared_activation_format;
  return out;
}

}  // namespace nvfp4_moe
