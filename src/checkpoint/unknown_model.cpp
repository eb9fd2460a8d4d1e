#include "checkpoint/unknown_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/layer_index.h"
#include "checkpoint/model_config.h"
#include "checkpoint/names.h"
#include "core/printable.h"

namespace nvfp4_moe::internal {
namespace {

constexpr std::string_view kWhere =
    "docs/reference/checkpoints.md lists the known ones, and what else may be set";

bool same_rules(const ModelRow& a, const ModelRow& b) {
  return std::string_view(a.intermediate) == b.intermediate && a.activation == b.activation &&
         a.layers == b.layers && a.shared == b.shared && a.router_weight == b.router_weight &&
         a.biases == b.biases && std::string_view(a.layer_count) == b.layer_count;
}

bool contains_any(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view word) { return text.find(word) != text.npos; });
}

bool is_set(const Json& value) {
  return !value.is_null() && value != Json(false) && value != Json(0) && value != Json(0.0);
}

// Fields that the rules read, or that are compared by them.
bool reads_field(const ModelRow& row, std::string_view key) {
  if (key == "moe_latent_size" || key == "routed_expert_hidden_size")
    return std::string_view(row.family) == "kimi" || row.activation == ActRule::kRelu2;
  switch (row.activation) {
    case ActRule::kClamped: return key == "swiglu_limit";
    case ActRule::kOai:
      return key == "swiglu_limit" || key == "swiglu_alpha" || key == "swiglu_beta";
    case ActRule::kGptOss: return key == "swiglu_limit" || key == "swiglu_alpha";
    case ActRule::kStep: return key == "swiglu_limits";
    case ActRule::kRelu2: return key == "mlp_hidden_act";
    case ActRule::kKimi:
      return key == "activation_situ_beta" || key == "activation_situ_linear_beta";
    case ActRule::kSoftCapped: return key == "mlp_gate_softcap" || key == "mlp_up_softcap";
    case ActRule::kGelu:
    case ActRule::kSilu:
    case ActRule::kSiluAlone: return false;
  }
  return false;
}

// Whether a field names an activation, and not one of another part of the model.
bool names_activation(std::string_view key) {
  const bool act = key.ends_with("_act") || key.ends_with("act_fn") ||
                   key.ends_with("activation_fn") || key.ends_with("activation_func") ||
                   key.ends_with("activation") || key.ends_with("activation_function") ||
                   key.ends_with("activation_type") || key.ends_with("act_func");
  return act && !contains_any(key, {"mamba", "ssm", "conv", "vision", "audio", "attn", "attention",
                                    "router", "projector"});
}

// One way to read the files, and the model types whose rules lead to it.
struct Reading {
  std::string text;
  bool order_unknown = false;
  std::vector<std::string_view> types;
};

std::string described(const ModelInfo& model, const LayerEntry& entry) {
  const MoeOptions& sizes = model.options;
  const Projection first = entry.routed.projections().front();
  std::string text =
      fmt::format("{} layers of {} experts, top_k {}, hidden {}, intermediate {}, {}",
                  model.layers.size(), sizes.num_experts, sizes.top_k, sizes.hidden_size,
                  sizes.intermediate_size, to_string(sizes.activation));
  if (sizes.swiglu_limit) text += fmt::format(", limit {}", *sizes.swiglu_limit);
  if (sizes.activation == Activation::kSwigluOai)
    text += fmt::format(", alpha {}", sizes.swiglu_alpha);
  if (sizes.activation == Activation::kSitu)
    text += fmt::format(", limits {} and {}", *sizes.situ_gate_limit, *sizes.situ_up_limit);
  for (const auto& [layer, limit] : model.swiglu_limits)
    text += fmt::format(", layer {} limit {}", layer, limit);
  text += fmt::format(", router weight {}", to_string(sizes.router_weight));
  text += entry.shared ? fmt::format(", shared expert {}", sizes.shared_intermediate_size)
                       : std::string(", no shared expert");
  if (entry.routed.stacked_k_first && entry.routed.role == TensorRole::kStacked)
    text += ", K first";
  return text + fmt::format(", {} in {}", to_string(entry.routed.parts.format),
                            printable(entry.routed.name(0, first, entry.routed.parts.codes), 400));
}

// Whether opening left something open that a reading must explain. order: gate and up are in one
// tensor, in an order that the caller must give.
Status check_complete(const FindingList& findings, bool& order) {
  constexpr std::array kOpen = {"missing_layer", "undeclared_layer", "shared_expert_missing",
                                "shared_expert_not_loaded", "layer_not_supported"};
  for (const Finding& finding : findings.all()) {
    if (finding.id == "gate_up_order_unknown") {
      order = true;
      continue;
    }
    const bool open =
        std::any_of(kOpen.begin(), kOpen.end(), [&](const char* id) { return finding.id == id; }) ||
        (finding.id == "ignored_tensor" && finding.actual.starts_with("shared expert in a form"));
    if (open || finding.severity == Severity::kError) return error_of(finding, 0);
  }
  return {};
}

Result<Reading> read_names(const TensorIndex& index, ModelInfo model) {
  FindingList findings;
  NVFP4_MOE_ASSIGN(const LayerIndex layers, LayerIndex::build(index, {}, model, findings));
  Reading reading;
  NVFP4_MOE_TRY(check_complete(findings, reading.order_unknown));
  reading.text = described(model, *layers.find(model.layers.front()));
  return reading;
}

// Words between the dots of the files' names. They view the index.
std::unordered_set<std::string_view> words_of(const TensorIndex& index) {
  std::unordered_set<std::string_view> words;
  for (const auto& [name, ref] : index.tensors()) {
    const std::string_view text = name;
    for (size_t begin = 0, end = 0; end != text.npos; begin = end + 1) {
      end = text.find('.', begin);
      words.insert(text.substr(begin, end - begin));
    }
  }
  return words;
}

// Families whose name the readers of the config know. deepseek_v4 declares MXFP4 experts as fp8.
std::string_view by_name(std::string_view family) {
  return family == "kimi" || family == "deepseek_v4" ? family : std::string_view();
}

// Whether two rules found the same experts in the config.
bool same_model(const ModelInfo& a, const ModelInfo& b) {
  const bool same_formats = (a.family == "deepseek_v4") == (b.family == "deepseek_v4");
  return same_formats && a.options == b.options && a.model_hidden_size == b.model_hidden_size &&
         a.num_hidden_layers == b.num_hidden_layers && a.layers == b.layers &&
         a.shared_experts == b.shared_experts && a.swiglu_limits == b.swiglu_limits;
}

// The text with the model type's name replaced, so that one reason of several is one reason.
std::string without(std::string text, std::string_view model_type) {
  const std::string word = fmt::format(" {}", model_type);
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    text.replace(at, word.size(), " the family");
  return text;
}

// Reads the files by each rule, and each different set of rules and names only once.
class Readings {
 public:
  Readings(const TensorIndex& index, const ParsedConfigs& files)
      : index_(index), files_(files), words_(words_of(index)) {}

  Result<Reading> read_as(const ModelRow& row) {
    const auto config = std::find_if(configs_.begin(), configs_.end(), [&](const Config& seen) {
      return same_rules(*seen.row, row) && by_name(seen.row->family) == by_name(row.family) &&
             names_in_files(seen.row->family) == names_in_files(row.family);
    });
    if (config != configs_.end()) return config->reading;
    Result<Reading> reading = read_new(row);
    if (!reading.ok()) reading = unsupported(without(reading.status().message(), row.model_type));
    configs_.push_back({&row, reading});
    return reading;
  }
  int64_t scans() const { return static_cast<int64_t>(models_.size()); }

 private:
  struct Config {
    const ModelRow* row;
    Result<Reading> reading;
  };
  struct Model {
    ModelInfo info;  // as the config has it
    Result<Reading> reading;
  };

  Result<Reading> read_new(const ModelRow& row) {
    NVFP4_MOE_ASSIGN(ModelInfo info, read_model_config(files_, row.model_type));
    const auto model = std::find_if(models_.begin(), models_.end(), [&](const Model& seen) {
      return same_model(seen.info, info) &&
             names_in_files(seen.info.family) == names_in_files(info.family);
    });
    if (model != models_.end()) return model->reading;
    Result<Reading> reading = read_names(index_, info);
    info.quantization = nullptr;
    models_.push_back({std::move(info), reading});
    return reading;
  }

  // The family's names with only the words that occur in the files. The order of rows is left out,
  // since it must be given for an unknown model type.
  FamilyNames names_in_files(std::string_view family) const {
    FamilyNames names = *family_names(family);
    // The first block of dotted stacks has a meaning of its own.
    if (names.stacks != Stacks::kDottedInBlock)
      std::fill(std::remove_if(names.blocks.begin(), names.blocks.end(),
                               [&](std::string_view block) { return !words_.contains(block); }),
                names.blocks.end(), std::string_view());
    if (!words_.contains(names.shared.name) && !words_.contains(names.shared.other)) {
      names.shared = "";
      names.shared_beside_block = false;
    }
    names.interleaved = names.w13_interleaved = false;
    names.family = {};
    return names;
  }

  const TensorIndex& index_;
  const ParsedConfigs& files_;
  const std::unordered_set<std::string_view> words_;
  std::vector<Config> configs_;
  std::vector<Model> models_;
};

// Rules without a field for the activation would read any model as theirs.
bool may_be_advised(const ModelRow& row) {
  return row.activation != ActRule::kSiluAlone && row.activation != ActRule::kGptOss &&
         row.activation != ActRule::kStep;
}

std::string shown(const Reading& reading) {
  std::string text = fmt::format("--family {}", reading.types.front());
  if (reading.order_unknown) text += " with --gate-up-order";
  return text + fmt::format(" ({})", reading.text);
}

}  // namespace

Result<const ModelRow*> rules_of_family(std::string_view family) {
  if (const ModelRow* row = model_row(family)) return row;
  std::vector<std::string_view> types;
  const ModelRow* first = nullptr;
  bool differ = false;
  for (const ModelRow& row : model_rows()) {
    if (row.family != family) continue;
    types.push_back(row.model_type);
    if (first == nullptr) first = &row;
    differ = differ || !same_rules(*first, row);
  }
  if (first == nullptr) {
    return invalid_argument(fmt::format(
        "family: expected a known model type or family, got '{}'; {}", printable(family), kWhere));
  }
  if (!differ) return first;
  return invalid_argument(fmt::format(
      "family: expected one model type, since those of {} are read by different rules ({}), got {}",
      family, fmt::join(types, ", "), family));
}

Status check_unread_fields(const Json& config, const ModelRow& row) {
  for (const auto& [key, value] : config.items()) {
    if (!is_set(value) || reads_field(row, key)) continue;
    if (names_activation(key) && value.is_string()) {
      const std::string act = value.get<std::string>();
      const bool oai =
          row.activation == ActRule::kOai && (act == "swigluoai" || act == "swiglu_oai");
      const bool silu = row.activation != ActRule::kRelu2 && row.activation != ActRule::kGelu &&
                        (act == "silu" || act == "swish");
      const bool gelu = row.activation == ActRule::kGelu && act.starts_with("gelu");
      const bool situ = row.activation == ActRule::kKimi && act == "situ";
      if (silu || oai || gelu || situ) continue;
      return unsupported(fmt::format(
          "config.json {}: '{}' may be the experts' activation, and family {} has another",
          printable(key), printable(act), row.model_type));
    }
    const bool limits = contains_any(key, {"swiglu", "situ", "clamp", "glu_limit", "act_limit",
                                           "activation_limit", "expert_limit"}) &&
                        !names_activation(key);
    const bool softcap = contains_any(key, {"softcap", "soft_cap"}) &&
                         !contains_any(key, {"logit", "attn", "attention", "router"});
    const bool of_experts =
        contains_any(key, {"moe_latent", "moe_hidden", "expert_hidden", "expert_norm",
                           "post_expert", "pre_expert", "weight_on_input", "weights_on_input"});
    if (!limits && !softcap && !of_experts) continue;
    return unsupported(fmt::format(
        "config.json {}: may change what the experts compute, and family {} does not read it: "
        "choose a family that does, or remove the field if the experts do not use it",
        printable(key), row.model_type));
  }
  return {};
}

Advice advise_family(const TensorIndex& index, const ParsedConfigs& files) {
  Readings rules(index, files);
  std::vector<Reading> readings;
  std::map<std::string, std::vector<std::string_view>> refusals;  // reason -> model types
  for (const ModelRow& row : model_rows()) {
    if (!may_be_advised(row)) continue;
    Result<Reading> read = rules.read_as(row);
    if (!read.ok()) {
      refusals[read.status().message()].push_back(row.model_type);
      continue;
    }
    auto same = std::find_if(readings.begin(), readings.end(),
                             [&](const Reading& r) { return r.text == read->text; });
    if (same == readings.end()) same = readings.insert(same, *std::move(read));
    same->types.push_back(row.model_type);
  }
  if (readings.size() == 1)
    return {fmt::format("its files read as {}: give that (family= in Python, family in C) if it is "
                        "what the model computes; {}",
                        shown(readings.front()), kWhere),
            rules.scans()};
  if (!readings.empty()) {
    std::vector<std::string> all;
    for (const Reading& reading : readings) all.push_back(shown(reading));
    return {fmt::format("its files may be read as {}: give the one that the model computes "
                        "(family= in Python, family in C); {}",
                        fmt::join(all, " or "), kWhere),
            rules.scans()};
  }
  // Rules that got furthest say most: those that found the experts, else the most frequent reason.
  const auto rank = [](const auto& entry) {
    const bool named = entry.first.find("no tensor is named") == std::string::npos &&
                       !entry.first.ends_with("needs it");
    return std::pair(named, entry.second.size());
  };
  const auto best =
      std::max_element(refusals.begin(), refusals.end(),
                       [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  return {fmt::format("no known family reads its files; as {}: {}; {}", best->second.front(),
                      best->first, kWhere),
          rules.scans()};
}

}  // namespace nvfp4_moe::internal
