// Reads, with checks, the fields that a model type's row lists (model_types.h). model_layers.cpp
// reads which layers have experts, model_activation.cpp their activation.
#include "checkpoint/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "checkpoint/config_fields.h"
#include "checkpoint/model_activation.h"
#include "checkpoint/model_layers.h"
#include "checkpoint/model_types.h"
#include "checkpoint/names.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/unknown_model.h"
#include "io/files.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

using json = Json;

constexpr JsonLimits kConfigLimits = {.non_finite = true};

Result<std::string> model_type_of(const json& config) {
  const json* value = member(config, "model_type");
  if (value == nullptr) return std::string();
  if (!value->is_string()) {
    return bad_input(
        fmt::format("config.json model_type: expected a string, got {}", describe_json(*value)));
  }
  return value->get<std::string>();
}

// The part of a multimodal wrapper's config that describes the language model, or the config
// itself.
const json& language_config(const json& config) {
  const json* found = &config;
  for (const char* key : {"thinker_config", "text_config", "language_config", "llm_config"}) {
    const json* inner = member(*found, key);
    if (inner == nullptr || !inner->is_object()) continue;
    found = inner;
    if (key != std::string_view("thinker_config")) break;
  }
  return *found;
}

// Reads the per-layer limits of a SwiGLU whose gate and up are clamped after silu. 0 or null means
// no limit.
Status read_layer_limits(const json& config, int64_t count, std::map<int64_t, float>& limits) {
  const json* list = member(config, "swiglu_limits");
  if (list == nullptr) return {};
  if (!list->is_array() || static_cast<int64_t>(list->size()) < count) {
    return bad_input(fmt::format("config.json swiglu_limits: expected a list of {}, got {}", count,
                                 describe_json(*list)));
  }
  for (int64_t layer = 0; layer < count; ++layer) {
    const json& entry = (*list)[static_cast<size_t>(layer)];
    if (entry.is_null() || entry == 0) continue;
    const std::optional<float> limit = finite_float(entry);
    if (!limit || !(*limit > 0)) {
      return bad_input(
          fmt::format("config.json swiglu_limits entry {}: expected a number >= 0 or null, got {}",
                      layer, describe_json(entry)));
    }
    limits[layer] = *limit;
  }
  return {};
}

Status read_shared(const json& config, const ModelRow& row, ModelInfo& out) {
  int64_t& count = out.shared_experts;
  int64_t& size = out.options.shared_intermediate_size;
  switch (row.shared) {
    case SharedRule::kNone: break;
    case SharedRule::kCount:
    case SharedRule::kMaybeCount:
    case SharedRule::kOwnCount: {
      NVFP4_MOE_ASSIGN(
          const std::optional<int64_t> shared,
          optional_int(config, {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts"},
                       0, 1024));
      // present as null: DeepSeek's way to declare no shared expert
      const bool null = config.contains("n_shared_experts");
      if (!shared && !null && row.shared != SharedRule::kMaybeCount)
        return missing_field("n_shared_experts", row.model_type);
      std::optional<int64_t> own;
      if (row.shared == SharedRule::kOwnCount) {
        NVFP4_MOE_ASSIGN(own, optional_int(config,
                                           {"moe_shared_expert_intermediate_size",
                                            "shared_experts_intermediate_size"},
                                           1, kMaxModelSize));
      }
      count = shared.value_or(0);
      size = count * own.value_or(out.options.intermediate_size);
      break;
    }
    case SharedRule::kGranite: {
      NVFP4_MOE_ASSIGN(size, required_int(config, {"shared_intermediate_size"}, 0, kMaxModelSize,
                                          row.model_type));
      break;
    }
    case SharedRule::kMlp: {
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> shared,
                       optional_int(config, {"num_shared_expert"}, 0, 1024));
      count = shared.value_or(1);
      size = count * out.options.intermediate_size;
      break;
    }
    case SharedRule::kOwnSize: {
      NVFP4_MOE_ASSIGN(size, required_int(config, {"shared_expert_intermediate_size"}, 0,
                                          kMaxModelSize, row.model_type));
      break;
    }
    case SharedRule::kMinimax: {
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> shared,
                       optional_int(config, {"shared_intermediate_size"}, 0, kMaxModelSize));
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> number,
                       optional_int(config, {"n_shared_experts"}, 0, 1024));
      count = shared.value_or(0) > 0 ? number.value_or(1) : 0;
      size = shared.value_or(0) * count;
      break;
    }
    case SharedRule::kLlama4: size = out.options.intermediate_size; break;
    case SharedRule::kNemotron: {  // a multiple of its own size
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> shared,
                       optional_int(config, {"n_shared_experts"}, 0, 1024));
      if (!shared && !config.contains("n_shared_experts"))
        return missing_field("n_shared_experts", row.model_type);
      count = shared.value_or(0);
      if (count == 0) break;
      NVFP4_MOE_ASSIGN(size, required_int(config, {"moe_shared_expert_intermediate_size"}, 0,
                                          kMaxModelSize, row.model_type));
      size *= count;
      break;
    }
  }
  if (count == 0 && size > 0) count = 1;
  return {};
}

// Reads hf_quant_config.json. A file of another form is an error for any experts.
Result<HfQuantization> hf_quantization(std::string_view hf_quant_json) {
  Result<json> root = parse_json_strict(hf_quant_json, kConfigLimits);
  if (!root.ok()) return root.status().in("hf_quant_config.json");
  const json* quantization = root->is_object() ? member(*root, "quantization") : nullptr;
  if (quantization == nullptr) return bad_input("hf_quant_config.json quantization: missing");
  HfQuantization out{*quantization, ""};
  if (const json* named = member(*root, "producer"); named != nullptr && named->is_object()) {
    const json* name = member(*named, "name");
    const json* version = member(*named, "version");
    if (name != nullptr && name->is_string()) out.producer = name->get<std::string>();
    if (version != nullptr && version->is_string())
      out.producer += " " + version->get<std::string>();
  }
  return out;
}

// Keeps a declaration that is not understood as a refusal, since experts in floats need no
// declaration.
QuantDeclaration declaration_in(const char* file, const json& quantization,
                                std::string_view family) {
  Result<QuantDeclaration> parsed = parse_quantization(quantization, family);
  if (!parsed.ok()) {
    QuantDeclaration out;
    out.refusal = parsed.status().in(file);
    return out;
  }
  for (std::vector<ModuleRules>* list : {&parsed->rules, &parsed->rotations})
    for (ModuleRules& rules : *list) rules.refuse_in(file);
  return *std::move(parsed);
}

// Reads the declarations of both files. If both declare something, they must agree.
// hf_quant_config.json is ModelOpt's. Next to a compressed-tensors config.json it is ignored: that
// library's converter copied it from the source.
Result<QuantDeclaration> read_quantization(const ParsedConfigs& files, const json& language,
                                           std::string_view family) {
  QuantDeclaration from_config;
  const json* flat = member(files.config, "quantization_config");
  if (flat == nullptr) flat = member(language, "quantization_config");
  if (flat == nullptr)
    flat = member(files.config, "compression_config");  // the name in llm-compressor's older files
  if (flat != nullptr)
    from_config = declaration_in("config.json quantization_config", *flat, family);
  // compressed-tensors itself writes no second file, but models with moe_quant_format may have one.
  if (!files.hf_quant || from_config.method.starts_with("compressed")) return from_config;
  if (!files.hf_quant->ok()) return files.hf_quant->status();
  const HfQuantization& hf_quant = **files.hf_quant;
  QuantDeclaration from_file =
      declaration_in("hf_quant_config.json", hf_quant.quantization, family);
  if (flat == nullptr) {
    from_file.producer = hf_quant.producer;
    return from_file;
  }
  if (!from_config.refusal.ok()) return from_config;
  if (!from_file.refusal.ok()) {
    from_config.refusal = from_file.refusal;
  } else if (from_config.algo != from_file.algo || from_config.format != from_file.format) {
    from_config.refusal = bad_input(
        fmt::format("hf_quant_config.json quant_algo: expected '{}' as in config.json, got '{}'",
                    printable(from_config.algo), printable(from_file.algo)));
  } else {
    std::move(from_file.rules.begin(), from_file.rules.end(),
              std::back_inserter(from_config.other_file));
  }
  return from_config;
}

// The rules for a model type: those that are known, else those that the caller chose, which are
// reported.
Result<const ModelRow*> rules_of(const std::string& model_type, const std::string& outer_type,
                                 std::string_view family, const json& config, ModelInfo& out) {
  const ModelRow* row = model_row(model_type);
  if (row == nullptr) row = model_row(outer_type);
  if (row == nullptr && family.empty()) {
    return unsupported(
               fmt::format("config.json model_type '{}' is not known", printable(model_type)))
        .of_finding(std::string(kUnknownModelType));
  }
  if (family.empty()) return row;
  if (row != nullptr) {
    if (row->model_type == family || row->family == family) return row;
    return invalid_argument(
        fmt::format("family: expected none, since config.json model_type '{}' is known, got {}",
                    printable(model_type), printable(family)));
  }
  NVFP4_MOE_ASSIGN(const ModelRow* chosen, rules_of_family(family));
  NVFP4_MOE_TRY(check_unread_fields(config, *chosen));
  out.read_as = chosen->model_type;
  out.findings.push_back({Severity::kWarning, "read_as_family", -1, -1, "config.json model_type",
                          "a known model type",
                          fmt::format("'{}', which is read as {}, as family says",
                                      printable(model_type), chosen->model_type)});
  return chosen;
}

}  // namespace

Result<ParsedConfigs> parse_config_files(std::string_view config_json,
                                         std::string_view hf_quant_json) {
  Result<json> root = parse_json_strict(config_json, kConfigLimits);
  if (!root.ok()) return root.status().in("config.json");
  if (!root->is_object())
    return bad_input("config.json: expected an object, got " + describe_json(*root));
  ParsedConfigs out{*std::move(root), std::nullopt};
  if (!hf_quant_json.empty()) out.hf_quant = hf_quantization(hf_quant_json);
  return out;
}

Result<ModelInfo> parse_model_config(std::string_view config_json, std::string_view hf_quant_json,
                                     std::string_view family) {
  NVFP4_MOE_ASSIGN(const ParsedConfigs files, parse_config_files(config_json, hf_quant_json));
  return read_model_config(files, family);
}

Result<ModelInfo> read_model_config(const ParsedConfigs& files, std::string_view family) {
  const json& root = files.config;
  const json& config = language_config(root);
  NVFP4_MOE_ASSIGN(const std::string outer_type, model_type_of(root));
  NVFP4_MOE_ASSIGN(std::string model_type, model_type_of(config));
  if (model_type.empty()) model_type = outer_type;
  if (model_type.empty() && family.empty()) return bad_input("config.json model_type: missing");
  for (const std::string& type : {model_type, outer_type}) {
    const std::string_view reason = reason_to_decline(type);
    if (!reason.empty())
      return unsupported(fmt::format("config.json model_type {}: {}", type, reason));
  }
  ModelInfo out;
  NVFP4_MOE_ASSIGN(const ModelRow* row, rules_of(model_type, outer_type, family, config, out));
  out.model_type = printable(model_type);  // these strings end up in messages and tables
  // Kimi-K2 and K2.5 may call their language model deepseek_v3; the wrapper's type decides.
  const ModelRow* outer_row = model_row(outer_type);
  out.family = outer_row != nullptr ? outer_row->family : row->family;
  if (const json* list = member(root, "architectures");
      list != nullptr && list->is_array() && !list->empty()) {
    if (list->front().is_string()) out.architecture = printable(list->front().get<std::string>());
  }
  MoeOptions& options = out.options;
  NVFP4_MOE_ASSIGN(out.num_hidden_layers, count_layers(config, *row, model_type));
  NVFP4_MOE_ASSIGN(out.model_hidden_size,
                   required_int(config, {"hidden_size"}, 1, kMaxModelSize, model_type));
  // If experts come after a projection, they have a width of their own.
  NVFP4_MOE_ASSIGN(
      const std::optional<int64_t> latent,
      optional_int(config, {"moe_latent_size", "routed_expert_hidden_size"}, 1, kMaxModelSize));
  if (latent && row->activation != ActRule::kRelu2 && row->family != "kimi")
    return unsupported(
        fmt::format("config.json moe_latent_size: experts after a projection are known of "
                    "nemotron_h and kimi only, not of {}",
                    printable(model_type)));
  options.hidden_size = latent.value_or(out.model_hidden_size);
  constexpr const char* kExpertSize = "moe_intermediate_size";
  const bool own_size = row->shared == SharedRule::kMlp &&
                        member(config, kExpertSize) != nullptr;  // Hunyuan's published files
  NVFP4_MOE_ASSIGN(options.intermediate_size,
                   required_int(config, {own_size ? kExpertSize : row->intermediate}, 1,
                                kMaxModelSize, model_type));
  NVFP4_MOE_ASSIGN(options.num_experts, required_int(config,
                                                     {"n_routed_experts", "num_experts",
                                                      "num_local_experts", "moe_num_experts"},
                                                     1, kMaxModelExperts, model_type));
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> top_k,
                   optional_int(config,
                                {"num_experts_per_tok", "num_experts_per_token", "moe_topk",
                                 "moe_k", "moe_top_k", "top_k_experts"},
                                1, kMaxModelExperts));
  if (top_k) {
    options.top_k = *top_k;
  } else {  // checked last, since generation settings also use this word
    NVFP4_MOE_ASSIGN(const std::optional<int64_t> plain,
                     optional_int(config, {"top_k"}, 1, kMaxModelExperts));
    if (!plain) return missing_field("num_experts_per_tok", model_type);
    options.top_k = *plain;
  }
  if (options.top_k > options.num_experts) {
    return bad_input(
        fmt::format("config.json num_experts_per_tok: expected at most the {} experts, got {}",
                    options.num_experts, options.top_k));
  }
  options.router_weight = row->router_weight;
  options.expert_biases = row->biases;
  if (row->router_weight == RouterWeight::kBeforeDown) {
    // Weights are normalised and then scaled by this factor, so it bounds each of them.
    NVFP4_MOE_ASSIGN(options.max_router_weight,
                     required_positive(config, "routed_scaling_factor", model_type));
  }
  if (const json* on_input = member(config, "moe_apply_router_weight_on_input");
      on_input != nullptr && *on_input != false)
    return unsupported("config.json moe_apply_router_weight_on_input: expected false");
  NVFP4_MOE_TRY(read_activation(config, *row, options));
  if (row->activation == ActRule::kStep)
    NVFP4_MOE_TRY(read_layer_limits(config, out.num_hidden_layers, out.swiglu_limits));
  NVFP4_MOE_TRY(read_layers(config, *row, out.num_hidden_layers, out.layers));
  NVFP4_MOE_TRY(read_shared(config, *row, out));
  if (out.layers.empty()) return bad_input("config.json: no layer of the model is an MoE layer");
  if (row->router_weight == RouterWeight::kOnInput && options.top_k != 1) {
    return unsupported(
        fmt::format("config.json num_experts_per_tok: {} multiplies hidden by the router weight "
                    "before gemm1, which "
                    "this library offers for one expert per token only, got {}",
                    printable(model_type), options.top_k));
  }

  NVFP4_MOE_ASSIGN(QuantDeclaration quantization, read_quantization(files, config, out.family));
  out.format = quantization.format;
  out.quant_method = printable(quantization.method);
  out.quant_algo = quantization.algo;
  out.producer = printable(quantization.producer);
  out.quantization = std::make_shared<QuantDeclaration>(std::move(quantization));
  return out;
}

}  // namespace nvfp4_moe::internal
