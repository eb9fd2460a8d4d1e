// One row per architecture; see gguf_config.h. Keys are "<architecture>.expert_count" and the like.
#include "checkpoint/gguf_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/model_config.h"
#include "core/printable.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

enum class GgufSharedRule : uint8_t { kNone, kCount, kOwnSize, kOneAlike };
// Which blocks are MoE layers. kEvery: all after the dense ones, at a fixed interval. kListed:
// those with a width of their own in a list.
enum class GgufLayerRule : uint8_t { kEvery, kListed };

struct Row {
  std::string_view architecture;
  std::string_view family;
  GgufSharedRule shared;
  RouterWeight router_weight = RouterWeight::kAfterDown;
  Activation activation = Activation::kSwiglu;
  bool biases = false;  // experts have biases
  GgufLayerRule layers = GgufLayerRule::kEvery;
};
constexpr Row kRows[] = {
    {"llama", "mixtral", GgufSharedRule::kNone},
    {"qwen2moe", "qwen", GgufSharedRule::kOwnSize},
    {"qwen3moe", "qwen", GgufSharedRule::kNone},
    {"qwen3next", "qwen", GgufSharedRule::kOwnSize},
    {"qwen35moe", "qwen", GgufSharedRule::kOwnSize},
    {"qwen3vlmoe", "qwen_vl", GgufSharedRule::kNone},
    {"deepseek2", "deepseek_v3", GgufSharedRule::kCount},
    {"deepseek32", "deepseek_v3", GgufSharedRule::kCount},
    {"deepseek4", "deepseek_v4", GgufSharedRule::kCount, RouterWeight::kBeforeDown,
     Activation::kSwigluClamped},
    {"glm4moe", "glm", GgufSharedRule::kCount},
    {"glm-dsa", "glm", GgufSharedRule::kCount},
    {"kimi-linear", "kimi", GgufSharedRule::kCount},
    {"minimax-m2", "minimax", GgufSharedRule::kNone},
    {"llama4", "llama4", GgufSharedRule::kOneAlike, RouterWeight::kOnInput},
    {"gpt-oss", "gpt_oss", GgufSharedRule::kNone, RouterWeight::kAfterDown, Activation::kSwigluOai,
     true},
    {"nemotron_h_moe", "nemotron_h", GgufSharedRule::kOwnSize, RouterWeight::kAfterDown,
     Activation::kRelu2, false, GgufLayerRule::kListed},
};

// The fields of one architecture.
class Fields {
 public:
  Fields(const GgufMetadata& metadata, std::string architecture)
      : metadata_(metadata), architecture_(std::move(architecture)) {}

  std::string key(std::string_view field) const {
    return fmt::format("{}.{}", architecture_, field);
  }

  const GgufValue* find(std::string_view field) const {
    const auto found = metadata_.find(key(field));
    return found == metadata_.end() ? nullptr : &found->second;
  }

  Status refuse(std::string_view field, std::string_view expected, const GgufValue& value) const {
    return bad_input(fmt::format("metadata '{}': expected {}, got {}", printable(key(field)),
                                 expected, describe(value)));
  }

  Result<std::optional<int64_t>> integer(std::string_view field, int64_t low, int64_t high) const {
    const GgufValue* value = find(field);
    if (value == nullptr) return std::optional<int64_t>();
    const auto* number = std::get_if<int64_t>(value);
    if (number == nullptr || *number < low || *number > high)
      return refuse(field, fmt::format("an integer in [{}, {}]", low, high), *value);
    return std::optional<int64_t>(*number);
  }

  Result<int64_t> required(std::string_view field, int64_t low, int64_t high) const {
    NVFP4_MOE_ASSIGN(const std::optional<int64_t> value, integer(field, low, high));
    if (!value) return missing(field);
    return *value;
  }

  Status missing(std::string_view field) const {
    return bad_input(fmt::format("metadata '{}': missing, and {} needs it", printable(key(field)),
                                 architecture_));
  }

  // A number, or one number per layer; empty if there is no such field.
  Result<std::vector<double>> numbers(std::string_view field) const {
    const GgufValue* value = find(field);
    if (value == nullptr) return std::vector<double>();
    if (const auto* number = std::get_if<double>(value)) return std::vector<double>{*number};
    if (const auto* list = std::get_if<std::vector<double>>(value)) return *list;
    return refuse(field, "a float, or an array of them", *value);
  }

 private:
  const GgufMetadata& metadata_;
  std::string architecture_;
};

Result<std::string> text_of(const GgufMetadata& metadata, std::string_view key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::string();
  const auto* text = std::get_if<std::string>(&found->second);
  if (text == nullptr)
    return bad_input(
        fmt::format("metadata '{}': expected a string, got {}", key, describe(found->second)));
  return *text;
}

Status read_activation(const Fields& fields, const Row& row, int64_t layers, MoeOptions& options) {
  if (const GgufValue* value = fields.find("hidden_activation")) {
    const auto* name = std::get_if<std::string>(value);
    if (name == nullptr || (*name != "silu" && *name != "swish"))
      return unsupported(fmt::format("metadata '{}': expected silu for {}, got {}",
                                     fields.key("hidden_activation"), row.architecture,
                                     describe(*value)));
  }
  options.activation = row.activation;
  NVFP4_MOE_ASSIGN(std::vector<double> limits, fields.numbers("swiglu_clamp_exp"));
  NVFP4_MOE_ASSIGN(std::vector<double> shared_limits, fields.numbers("swiglu_clamp_shexp"));
  for (std::vector<double>* list :
       {&limits, &shared_limits})  // prediction blocks have entries after the layers' entries
    list->resize(std::min(list->size(), static_cast<size_t>(layers)));
  if (row.activation != Activation::kSwigluClamped) {
    const auto clamps = [](double limit) { return limit != 0; };
    if (std::any_of(limits.begin(), limits.end(), clamps) ||
        std::any_of(shared_limits.begin(), shared_limits.end(), clamps))
      return unsupported(fmt::format("metadata '{}': {} is known here with plain silu(g)*u only",
                                     fields.key("swiglu_clamp_exp"), row.architecture));
    if (row.activation == Activation::kSwigluOai)
      options.swiglu_limit = 7.0f;  // a constant of llama.cpp's code
    return {};
  }
  if (limits.empty()) return fields.missing("swiglu_clamp_exp");
  const double limit = limits.front();
  const auto same = [&](double other) { return other == limit; };
  if (!std::all_of(limits.begin(), limits.end(), same) ||
      !std::all_of(shared_limits.begin(), shared_limits.end(), same))
    return unsupported(fmt::format("metadata '{}': layers with several limits are not implemented",
                                   fields.key("swiglu_clamp_exp")));
  const std::optional<float> rounded = finite_float(limit);
  if (!rounded || !(*rounded > 0))
    return fields.refuse("swiglu_clamp_exp", "a positive number", GgufValue(limit));
  options.swiglu_limit = *rounded;
  return {};
}

Status read_shared(const Fields& fields, const Row& row, ModelInfo& out) {
  int64_t& size = out.options.shared_intermediate_size;
  switch (row.shared) {
    case GgufSharedRule::kNone: return {};
    case GgufSharedRule::kCount: {
      NVFP4_MOE_ASSIGN(out.shared_experts, fields.required("expert_shared_count", 0, 1024));
      size = out.shared_experts * out.options.intermediate_size;
      return {};
    }
    case GgufSharedRule::kOwnSize: {
      NVFP4_MOE_ASSIGN(size,
                       fields.required("expert_shared_feed_forward_length", 0, kMaxModelSize));
      break;
    }
    case GgufSharedRule::kOneAlike: size = out.options.intermediate_size; break;
  }
  out.shared_experts = size > 0 ? 1 : 0;
  return {};
}

// Whether a block after the model's own ones is a prediction block, which predicts tokens further
// ahead. Some files declare such blocks and have none. All of their blocks are then the model's
// own.
bool has_prediction_block(const TensorIndex& index, int64_t block) {
  const std::string prefix = fmt::format("blk.{}.nextn.", block);
  const auto found = index.tensors().lower_bound(prefix);
  return found != index.tensors().end() && found->first.starts_with(prefix);
}

// llama.cpp's rule: a block is attention or Mamba if its width is 0.
Status read_listed_layers(const Fields& fields, ModelInfo& out) {
  constexpr std::string_view kField = "feed_forward_length";
  const GgufValue* value = fields.find(kField);
  if (value == nullptr) return fields.missing(kField);
  const auto* widths = std::get_if<std::vector<int64_t>>(value);
  if (widths == nullptr || static_cast<int64_t>(widths->size()) < out.num_hidden_layers)
    return fields.refuse(kField, fmt::format("an array of {} integers", out.num_hidden_layers),
                         *value);
  for (int64_t layer = 0; layer < out.num_hidden_layers; ++layer)
    if ((*widths)[static_cast<size_t>(layer)] != 0) out.layers.push_back(layer);
  return {};
}

Status read_layers(const Fields& fields, const TensorIndex& index, const Row& row, ModelInfo& out) {
  NVFP4_MOE_ASSIGN(const int64_t blocks, fields.required("block_count", 1, kMaxModelLayers));
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> ahead,
                   fields.integer("nextn_predict_layers", 0, blocks - 1));
  const int64_t main = blocks - ahead.value_or(0);
  out.num_hidden_layers = has_prediction_block(index, main) ? main : blocks;
  if (row.layers == GgufLayerRule::kListed) {
    NVFP4_MOE_TRY(read_listed_layers(fields, out));
  } else {
    NVFP4_MOE_ASSIGN(const std::optional<int64_t> dense,
                     fields.integer("leading_dense_block_count", 0, kMaxModelLayers));
    NVFP4_MOE_ASSIGN(const std::optional<int64_t> step,
                     fields.integer("interleave_moe_layer_step", 0, kMaxModelLayers));
    for (int64_t layer = dense.value_or(0); layer < out.num_hidden_layers && step.value_or(1) > 0;
         ++layer)
      if ((layer + 1) % step.value_or(1) == 0) out.layers.push_back(layer);
  }
  if (out.layers.empty()) return bad_input("metadata: no layer of the model is an MoE layer");
  return {};
}

}  // namespace

Result<ModelInfo> parse_gguf_config(const GgufMetadata& metadata, const TensorIndex& index) {
  NVFP4_MOE_ASSIGN(const std::string type, text_of(metadata, "general.type"));
  if (!type.empty() && type != "model")
    return unsupported(
        fmt::format("metadata 'general.type': expected a model, got '{}'", printable(type)));
  NVFP4_MOE_ASSIGN(const std::string architecture, text_of(metadata, "general.architecture"));
  if (architecture.empty()) return bad_input("metadata 'general.architecture': missing");
  const Row* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& known) {
    return known.architecture == architecture;
  });
  if (row == std::end(kRows))
    return unsupported(fmt::format(
        "metadata 'general.architecture' '{}' is not known; docs/reference/checkpoints.md lists "
        "those that are",
        printable(architecture)));
  const Fields fields(metadata, architecture);
  ModelInfo out;
  out.gguf = true;
  out.architecture = architecture;
  out.model_type = architecture;
  out.family = row->family;
  out.quant_method = "gguf";
  NVFP4_MOE_ASSIGN(const std::string producer, text_of(metadata, "general.quantized_by"));
  out.producer = printable(producer);
  MoeOptions& options = out.options;
  NVFP4_MOE_ASSIGN(options.num_experts, fields.required("expert_count", 1, kMaxModelExperts));
  NVFP4_MOE_ASSIGN(options.top_k, fields.required("expert_used_count", 1, kMaxModelExperts));
  if (options.top_k > options.num_experts)
    return bad_input(fmt::format("metadata '{}': expected at most the {} experts, got {}",
                                 fields.key("expert_used_count"), options.num_experts,
                                 options.top_k));
  NVFP4_MOE_ASSIGN(options.hidden_size, fields.required("embedding_length", 1, kMaxModelSize));
  out.model_hidden_size = options.hidden_size;
  if (row->activation ==
      Activation::kRelu2) {  // Nemotron-3 Super's experts come after a projection
    NVFP4_MOE_ASSIGN(const std::optional<int64_t> latent,
                     fields.integer("moe_latent_size", 1, kMaxModelSize));
    options.hidden_size = latent.value_or(out.model_hidden_size);
  }
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> own,
                   fields.integer("expert_feed_forward_length", 1, kMaxModelSize));
  if (own) {
    options.intermediate_size = *own;
  } else if (architecture == "llama") {  // Mixtral, whose layers have no other feed-forward
    NVFP4_MOE_ASSIGN(options.intermediate_size,
                     fields.required("feed_forward_length", 1, kMaxModelSize));
  } else {
    return fields.missing("expert_feed_forward_length");
  }
  options.router_weight = row->router_weight;
  options.expert_biases = row->biases;
  if (row->router_weight == RouterWeight::kBeforeDown) {
    // Weights are normalised and then scaled by this factor, so it bounds each of them.
    NVFP4_MOE_ASSIGN(const std::vector<double> scale, fields.numbers("expert_weights_scale"));
    if (scale.size() != 1) return fields.missing("expert_weights_scale");
    const std::optional<float> factor = finite_float(scale.front());
    if (!factor || !(*factor > 0))
      return fields.refuse("expert_weights_scale", "a positive number", GgufValue(scale.front()));
    options.max_router_weight = *factor;
  }
  if (row->router_weight == RouterWeight::kOnInput && options.top_k != 1)
    return unsupported(
        fmt::format("metadata '{}': {} multiplies hidden by the router weight before gemm1, which "
                    "this library offers "
                    "for one expert per token only, got {}",
                    fields.key("expert_used_count"), architecture, options.top_k));
  NVFP4_MOE_TRY(read_layers(fields, index, *row, out));
  NVFP4_MOE_TRY(read_activation(fields, *row, out.num_hidden_layers, options));
  NVFP4_MOE_TRY(read_shared(fields, *row, out));
  return out;
}

}  // namespace nvfp4_moe::internal
