#include "checkpoint/model_activation.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "checkpoint/config_fields.h"
#include "core/printable.h"

namespace nvfp4_moe::internal {
namespace {

using json = Json;

// Nemotron-H has separate fields for the activations of its experts and of its Mamba layers.
Status read_relu2(const json& config, const ModelRow& row, MoeOptions& options) {
  constexpr const char* kKey = "mlp_hidden_act";
  const json* value = member(config, kKey);
  if (value == nullptr) return missing_field(kKey, row.model_type);
  if (*value != json("relu2"))
    return unsupported(fmt::format("config.json {}: expected relu2 for {}, got {}", kKey,
                                   row.model_type, describe_json(*value)));
  options.activation = Activation::kRelu2;
  return {};
}

// The names are those of transformers' table of activations.
Status read_gelu(const json& config, const ModelRow& row, const std::string& act,
                 MoeOptions& options) {
  if (act.empty()) return missing_field("hidden_activation", row.model_type);
  if (act == "gelu_pytorch_tanh" || act == "gelu_tanh")
    options.activation = Activation::kGeluTanh;
  else if (act == "gelu")
    options.activation = Activation::kGelu;
  else
    return unsupported(
        fmt::format("config.json hidden_activation: expected gelu_pytorch_tanh or gelu for {}, got "
                    "'{}'",
                    row.model_type, printable(act)));
  // Gemma-4's models without experts have the same type.
  if (const json* block = member(config, "enable_moe_block");
      block != nullptr && *block != json(true))
    return unsupported(
        fmt::format("config.json enable_moe_block: expected true, got {}: the model has no experts",
                    describe_json(*block)));
  return {};
}

Status read_situ(const json& config, const ModelRow& row, const char* gate_limit,
                 const char* up_limit, MoeOptions& options) {
  options.activation = Activation::kSitu;
  NVFP4_MOE_ASSIGN(options.situ_gate_limit, required_positive(config, gate_limit, row.model_type));
  NVFP4_MOE_ASSIGN(options.situ_up_limit, required_positive(config, up_limit, row.model_type));
  return {};
}

// Refuses limits of each layer, as vLLM reads them for Ling-3. 0 or null: none.
Status check_no_limit_lists(const json& config, const ModelRow& row) {
  for (const char* key : {"expert_swiglu_limit_list", "share_expert_swiglu_limit_list"}) {
    const json* list = member(config, key);
    if (list == nullptr) continue;
    const bool none =
        list->is_array() && std::all_of(list->begin(), list->end(), [](const json& one) {
          return one.is_null() || one == json(0) || one == json(0.0);
        });
    if (!none)
      return unsupported(
          fmt::format("config.json {}: expected no limits of single layers for {}, got some", key,
                      row.model_type));
  }
  return {};
}

}  // namespace

Status read_activation(const json& config, const ModelRow& row, MoeOptions& options) {
  if (row.activation == ActRule::kRelu2) return read_relu2(config, row, options);
  std::string act;
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const json* value = member(config, key);
    if (value == nullptr) continue;
    if (!value->is_string()) {
      return bad_input(
          fmt::format("config.json {}: expected a string, got {}", key, describe_json(*value)));
    }
    act = value->get<std::string>();
    break;
  }
  if (row.activation == ActRule::kGelu) return read_gelu(config, row, act, options);
  const bool silu = act == "silu" || act == "swish";
  const bool oai = row.activation == ActRule::kOai && (act == "swigluoai" || act == "swiglu_oai");
  const bool situ = row.activation == ActRule::kKimi && act == "situ";
  if (act.empty() && (row.activation == ActRule::kSilu || row.activation == ActRule::kKimi))
    return missing_field("hidden_act", row.model_type);
  if (!act.empty() && !silu && !oai && !situ) {
    return unsupported(fmt::format("config.json hidden_act: expected silu for {}, got '{}'",
                                   row.model_type, printable(act)));
  }
  // swiglu_oai adds 1 to up.
  if (const json* beta = member(config, "swiglu_beta");
      (row.activation == ActRule::kOai || row.activation == ActRule::kGptOss) && beta != nullptr &&
      *beta != json(1) && *beta != json(1.0))
    return unsupported(fmt::format("config.json swiglu_beta: expected 1 for {}, got {}",
                                   row.model_type, describe_json(*beta)));
  switch (row.activation) {
    case ActRule::kGelu: break;
    case ActRule::kSoftCapped:
      return read_situ(config, row, "mlp_gate_softcap", "mlp_up_softcap", options);
    case ActRule::kKimi:
      if (situ)
        return read_situ(config, row, "activation_situ_beta", "activation_situ_linear_beta",
                         options);
      for (const char* key : {"activation_situ_beta", "activation_situ_linear_beta"}) {
        if (member(config, key) != nullptr)
          return unsupported(
              fmt::format("config.json {}: {} has it with hidden_act situ only, got '{}'", key,
                          row.model_type, printable(act)));
      }
      [[fallthrough]];
    case ActRule::kSilu:
      options.activation = Activation::kSwiglu;
      for (const char* key : {"swiglu_limit", "swiglu_limits", "swiglu_alpha"}) {
        if (member(config, key) != nullptr) {
          return unsupported(fmt::format(
              "config.json {}: {} is known here with plain silu(g)*u only", key, row.model_type));
        }
      }
      return check_no_limit_lists(config, row);
    case ActRule::kSiluAlone:
    case ActRule::kStep:
      options.activation = Activation::kSwiglu;
      for (const char* key : {"swiglu_limit", "swiglu_alpha"})
        if (member(config, key) != nullptr)
          return unsupported(
              fmt::format("config.json {}: {} is known here without it", key, row.model_type));
      return {};
    case ActRule::kClamped: {
      options.activation = Activation::kSwigluClamped;
      // 0 means no clamp in DeepSeek's own code, and is its default. Other families would clamp
      // everything to 0.
      if (const json* limit = member(config, "swiglu_limit");
          limit != nullptr && *limit == json(0) && row.family == "deepseek_v4") {
        options.activation = Activation::kSwiglu;
        return {};
      }
      NVFP4_MOE_ASSIGN(options.swiglu_limit,
                       required_positive(config, "swiglu_limit", row.model_type));
      return {};
    }
    case ActRule::kOai: {
      options.activation = Activation::kSwigluOai;
      NVFP4_MOE_ASSIGN(options.swiglu_limit,
                       required_positive(config, "swiglu_limit", row.model_type));
      NVFP4_MOE_ASSIGN(options.swiglu_alpha,
                       required_positive(config, "swiglu_alpha", row.model_type));
      return {};
    }
    case ActRule::kRelu2: break;
    case ActRule::kGptOss: {
      // Both are constants of the model's code. Configs name only the limit, or neither.
      options.activation = Activation::kSwigluOai;
      options.swiglu_limit = 7.0f;
      if (member(config, "swiglu_limit") != nullptr) {
        NVFP4_MOE_ASSIGN(options.swiglu_limit,
                         required_positive(config, "swiglu_limit", row.model_type));
      }
      if (member(config, "swiglu_alpha") != nullptr) {
        NVFP4_MOE_ASSIGN(options.swiglu_alpha,
                         required_positive(config, "swiglu_alpha", row.model_type));
      }
      return {};
    }
  }
  return {};
}

}  // namespace nvfp4_moe::internal
