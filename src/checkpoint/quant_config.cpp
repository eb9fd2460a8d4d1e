// See quant_config.h. Every algorithm that is refused is refused by its name, with what it would take to run it.
#include "checkpoint/quant_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "safetensors/files.h"
#include "safetensors/json_strict.h"

namespace nvfp4_moe {
namespace {

using json = Json;

// The string under `key`, "" where there is none.
Result<std::string> text(const json& object, const char* key) {
  const json* value = member(object, key);
  if (value == nullptr) return std::string();
  if (!value->is_string()) return bad_input(fmt::format("{}: expected a string, got {}", key, describe_json(*value)));
  return value->get<std::string>();
}

// The same with its ASCII letters turned, for names whose case differs between producers (ModelOpt: NVFP4, but mxfp4).
Result<std::string> upper(const json& object, const char* key) {
  NVFP4_MOE_ASSIGN(std::string value, text(object, key));
  for (char& c : value) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return value;
}
Result<std::string> lower(const json& object, const char* key) {
  NVFP4_MOE_ASSIGN(std::string value, text(object, key));
  for (char& c : value) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return value;
}

struct Refused {
  std::string_view algo;
  std::string_view reason;
};
constexpr Refused kRefused[] = {
    {"NVFP4_AWQ", "activations must be multiplied by pre_quant_scale first, which is not implemented"},
    {"NVFP4_SVD", "the low-rank part (svdquant_lora_a, svdquant_lora_b) is not implemented"},
    {"NVFP4_SVDQUANT", "the low-rank part (svdquant_lora_a, svdquant_lora_b) is not implemented"},
    {"W4A8_NVFP4_FP8", "FP8 activations with NVFP4 weights are not implemented"},
    {"W4A8_MXFP4_FP8", "FP8 activations with MXFP4 weights are not implemented"},
    {"W4A8_AWQ", "INT4 weights are not NVFP4"},
    {"W4A16_AWQ", "INT4 weights are not NVFP4"},
    {"INT4_AWQ", "INT4 weights are not NVFP4"},
    {"FP8", "FP8 experts are not NVFP4"},
    {"FP8_PB_WO", "FP8 experts are not NVFP4"},
    {"FP8_PB_REAL", "FP8 experts are not NVFP4"},
    {"FP8_PER_CHANNEL_PER_TOKEN", "FP8 experts are not NVFP4"},
    {"MXFP8", "FP8 experts are not NVFP4"},
    {"INT8_SQ", "INT8 experts are not NVFP4"},
};

Status check_group_size(const json& object, int64_t expected, std::string_view where) {
  const json* value = member(object, "group_size");
  if (value == nullptr) return {};
  const std::optional<int64_t> size = exact_int64(*value);
  if (!size) return bad_input(fmt::format("{}group_size: expected an integer, got {}", where, describe_json(*value)));
  if (*size != expected) {
    return unsupported(fmt::format("{}group_size: expected {} for {}, got {}", where, expected,
                                   expected == 16 ? "NVFP4" : "MXFP4", *size));
  }
  return {};
}

// Fills format and activation_format from the experts' algorithm.
Status apply_algo(QuantDeclaration& out, SourceFormat nvfp4_format) {
  if (out.algo == "NVFP4") {
    out.format = nvfp4_format;
  } else if (out.algo == "W4A16_NVFP4" || out.algo == "NVFP4A16") {
    out.format = nvfp4_format;
    out.activation_format = ActivationFormat::kBf16;
  } else if (out.algo == "MXFP4" || out.algo == "W4A16_MXFP4") {
    out.format = SourceFormat::kMxfp4;
    if (out.algo == "W4A16_MXFP4") out.activation_format = ActivationFormat::kBf16;
  } else {
    for (const Refused& row : kRefused) {
      if (row.algo == out.algo) return unsupported(fmt::format("quant_algo {}: {}", row.algo, row.reason));
    }
    return unsupported(
        fmt::format("quant_algo '{}' is not known; expected NVFP4, W4A16_NVFP4 or MXFP4", printable(out.algo)));
  }
  out.declared = true;
  return {};
}

bool mentions(std::string_view text, std::string_view word) { return text.find(word) != std::string_view::npos; }

bool in_main_layers(std::string_view name) { return !name.starts_with("mtp.") && !mentions(name, ".mtp."); }
bool names_shared_expert(std::string_view name) { return mentions(name, "shared_expert") && in_main_layers(name); }
bool names_routed_experts(std::string_view name) {
  return mentions(name, "experts") && !mentions(name, "shared_expert") && in_main_layers(name);
}

// 3 of "model.layers.3.mlp.experts"; -1 where no layer is named.
int64_t layer_of(std::string_view name) {
  const size_t at = name.starts_with("layers.") ? 0 : name.find(".layers.");
  if (at == std::string_view::npos) return -1;
  name.remove_prefix(name.find("layers.", at) + 7);
  int64_t layer = -1;
  for (size_t digits = 0; digits < 6 && digits < name.size() && name[digits] >= '0' && name[digits] <= '9'; ++digits)
    layer = std::max<int64_t>(layer, 0) * 10 + (name[digits] - '0');
  return layer;
}

LayerQuantization layer_quantization(const std::string& algo) {
  QuantDeclaration one;
  one.algo = algo;
  LayerQuantization out;
  out.refusal = apply_algo(one, SourceFormat::kModelOpt);
  out.algo = algo;
  out.format = one.format;
  out.activation_format = one.activation_format;
  return out;
}

// ModelOpt's MIXED_PRECISION: {"model.layers.3.mlp.experts.0.gate_proj": {"quant_algo": ..., "group_size": ...}, ...}
// Layers may differ; the experts of one layer may not.
Status apply_quantized_layers(const json& quantization, QuantDeclaration& out) {
  const json* layers = member(quantization, "quantized_layers");
  if (layers == nullptr) return bad_input("quantized_layers: missing, though quant_algo is MIXED_PRECISION");
  if (!layers->is_object()) {
    return bad_input(fmt::format("quantized_layers: expected an object, got {}", describe_json(*layers)));
  }
  std::map<int64_t, std::pair<std::string, std::string>> seen;  // layer -> algorithm, a name with it
  std::set<std::string> algos, shared;
  for (const auto& [name, entry] : layers->items()) {
    const bool routed = names_routed_experts(name);
    if (!routed && !names_shared_expert(name)) continue;
    NVFP4_MOE_ASSIGN(const std::string algo, upper(entry, "quant_algo"));
    if (!routed) {
      shared.insert(algo);
      continue;
    }
    if (algo.empty()) return bad_input(fmt::format("quantized_layers '{}' quant_algo: missing", printable(name)));
    algos.insert(algo);
    const auto [first, fresh] = seen.emplace(layer_of(name), std::pair(algo, name));
    if (fresh) {
      out.by_layer[first->first] = layer_quantization(algo);
    } else if (first->second.first != algo) {
      out.by_layer[first->first].refusal = unsupported(fmt::format(
          "quantized_layers: experts of a layer in two formats, {} for '{}' and {} for '{}'",
          printable(first->second.first), printable(first->second.second), printable(algo), printable(name)));
    }
    if (mentions(algo, "NVFP4")) {
      NVFP4_MOE_TRY(check_group_size(entry, 16, fmt::format("quantized_layers '{}' ", printable(name))));
    }
  }
  if (shared.size() == 1) {
    const LayerQuantization declared = layer_quantization(*shared.begin());
    if (declared.refusal.ok()) out.shared_activation_format = declared.activation_format;
  }
  if (algos.empty()) return {};  // only other modules are quantized: the experts are floats
  const auto loaded = std::find_if(out.by_layer.begin(), out.by_layer.end(),
                                   [](const auto& layer) { return layer.second.refusal.ok(); });
  if (loaded == out.by_layer.end()) return out.by_layer.begin()->second.refusal;
  out.algo = loaded->second.algo;
  NVFP4_MOE_TRY(apply_algo(out, SourceFormat::kModelOpt));
  if (algos.size() == 1 || out.by_layer.contains(-1)) {
    // A name without a layer's number speaks of all of them.
    if (algos.size() > 1) {
      return unsupported(fmt::format("quantized_layers: experts in several formats, and '{}' names no layer",
                                     printable(seen.at(-1).second)));
    }
    out.by_layer.clear();
  }
  return {};
}

Result<QuantDeclaration> parse_modelopt(const json& quantization, QuantDeclaration out) {
  NVFP4_MOE_ASSIGN(const std::string moe_algo, upper(quantization, "moe_quant_algo"));
  NVFP4_MOE_ASSIGN(out.algo, upper(quantization, "quant_algo"));
  if (!moe_algo.empty()) out.algo = moe_algo;
  if (out.algo.empty()) return bad_input("quant_algo: missing");
  if (out.algo == "MIXED_PRECISION") {
    out.algo.clear();
    NVFP4_MOE_TRY(apply_quantized_layers(quantization, out));
    return out;
  }
  NVFP4_MOE_TRY(apply_algo(out, SourceFormat::kModelOpt));
  const int64_t group = out.format == SourceFormat::kMxfp4 ? 32 : 16;
  NVFP4_MOE_TRY(check_group_size(quantization, group, ""));
  if (const json* groups = member(quantization, "config_groups"); groups != nullptr && groups->is_object()) {
    for (const auto& [name, entry] : groups->items()) {
      const json* weights = member(entry, "weights");
      if (weights == nullptr) continue;
      NVFP4_MOE_TRY(check_group_size(*weights, group, fmt::format("config_groups {} weights ", printable(name))));
    }
  }
  return out;
}

// One entry of compressed-tensors' config_groups as an algorithm's name, or "" where it has nothing to do with FP4.
Result<std::string> group_algo(const json& group, const std::string& where, const std::string& default_format) {
  const json* weights = member(group, "weights");
  if (weights == nullptr) return std::string();
  NVFP4_MOE_ASSIGN(std::string format, lower(group, "format"));
  if (format.empty()) format = default_format;
  NVFP4_MOE_ASSIGN(const std::string type, lower(*weights, "type"));
  const json* bits_value = member(*weights, "num_bits");
  const std::optional<int64_t> bits = bits_value == nullptr ? std::nullopt : exact_int64(*bits_value);
  if (!bits) return bad_input(where + "weights num_bits: missing or not an integer");
  if (*bits != 4 || type != "float") return std::string();
  const bool mxfp4 = format == "mxfp4-pack-quantized";
  if (!mxfp4 && format != "nvfp4-pack-quantized" && format != "mixed-precision" && !format.empty()) {
    return unsupported(fmt::format("{}format '{}': expected nvfp4-pack-quantized", where, printable(format)));
  }
  NVFP4_MOE_TRY(check_group_size(*weights, mxfp4 ? 32 : 16, where + "weights "));
  if (member(*weights, "group_size") == nullptr) return bad_input(where + "weights group_size: missing");
  if (const json* symmetric = member(*weights, "symmetric"); symmetric != nullptr && *symmetric != json(true)) {
    return unsupported(where + "weights symmetric: expected true (NVFP4 has no zero points)");
  }
  const json* input = member(group, "input_activations");
  if (input == nullptr) return std::string(mxfp4 ? "W4A16_MXFP4" : "W4A16_NVFP4");
  const json* input_bits_value = member(*input, "num_bits");
  const std::optional<int64_t> input_bits = input_bits_value == nullptr ? std::nullopt : exact_int64(*input_bits_value);
  if (!input_bits) return bad_input(where + "input_activations num_bits: missing or not an integer");
  if (*input_bits != 4) return std::string(mxfp4 ? "W4A8_MXFP4_FP8" : "W4A8_NVFP4_FP8");
  return std::string(mxfp4 ? "MXFP4" : "NVFP4");
}

// Which experts a group's target speaks of: a module's name, or "re:" and an expression for it. An expression is not
// run, since a hostile one takes for ever: it speaks of the experts whose word stands in it.
struct ExpertTargets {
  bool routed = false;
  bool shared = false;
};
ExpertTargets expert_targets(std::string_view target) {
  ExpertTargets out;
  for (size_t at = target.find("expert"); at != std::string_view::npos; at = target.find("expert", at + 1)) {
    const bool shared = target.substr(0, at).ends_with("shared_");
    (shared ? out.shared : out.routed) = true;
  }
  return out;
}

Result<QuantDeclaration> parse_compressed_tensors(const json& quantization, QuantDeclaration out) {
  NVFP4_MOE_ASSIGN(const std::string format, lower(quantization, "format"));
  if (const json* transforms = member(quantization, "transform_config");
      transforms != nullptr && member(*transforms, "config_groups") != nullptr &&
      !member(*transforms, "config_groups")->empty()) {
    return unsupported("transform_config: activations must be rotated (Hadamard) first, which is not implemented");
  }
  const json* groups = member(quantization, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) {
    return bad_input("config_groups: expected an object with at least one group");
  }
  std::map<std::string, std::string> all, routed, shared;  // algorithm -> a group with it
  for (const auto& [name, group] : groups->items()) {
    const std::string where = fmt::format("config_groups {} ", printable(name));
    NVFP4_MOE_ASSIGN(const std::string algo, group_algo(group, where, format));
    if (algo.empty()) continue;
    all.emplace(algo, name);
    const json* targets = member(group, "targets");
    if (targets == nullptr || !targets->is_array()) continue;
    for (const json& target : *targets) {
      if (!target.is_string()) continue;
      const ExpertTargets experts = expert_targets(target.text());
      if (experts.routed) routed.emplace(algo, name);
      if (experts.shared) shared.emplace(algo, name);
    }
  }
  if (all.empty()) {
    return unsupported(
        fmt::format("compressed-tensors format '{}': no group has 4-bit float weights", printable(format)));
  }
  // Who names the experts has them; a target like "Linear" speaks of what no other group names.
  std::map<std::string, std::string> rest = all;
  for (const auto& [algo, name] : shared) rest.erase(algo);
  const auto& algos = !routed.empty() ? routed : !rest.empty() ? rest : all;
  if (algos.size() > 1) {
    const auto& [first, first_group] = *algos.begin();
    const auto& [last, last_group] = *algos.rbegin();
    return unsupported(fmt::format(
        "config_groups: {} in {} and {} in {} are both {}", first, printable(first_group), last, printable(last_group),
        routed.empty() ? "4-bit float, and no target names the routed experts" : "for routed experts"));
  }
  if (shared.size() == 1) {
    const LayerQuantization declared = layer_quantization(shared.begin()->first);
    if (declared.refusal.ok()) out.shared_activation_format = declared.activation_format;
  }
  out.algo = algos.begin()->first;
  NVFP4_MOE_TRY(apply_algo(out, SourceFormat::kCompressedTensors));
  return out;
}

Result<std::string> producer_of(const json& quantization) {
  const json* producer = member(quantization, "producer");
  if (producer == nullptr) return std::string();
  if (producer->is_string()) return producer->get<std::string>();
  NVFP4_MOE_ASSIGN(std::string name, text(*producer, "name"));
  NVFP4_MOE_ASSIGN(const std::string version, text(*producer, "version"));
  return version.empty() ? name : name + " " + version;
}

}  // namespace

Result<QuantDeclaration> parse_quantization(const json& quantization, std::string_view family) {
  if (!quantization.is_object()) {
    return bad_input(fmt::format("expected an object, got {}", describe_json(quantization)));
  }
  QuantDeclaration out;
  NVFP4_MOE_ASSIGN(out.method, lower(quantization, "quant_method"));
  NVFP4_MOE_ASSIGN(out.producer, producer_of(quantization));
  if (out.method == "compressed-tensors" || out.method == "compressed_tensors") {
    return parse_compressed_tensors(quantization, std::move(out));
  }
  if (out.method.empty() || out.method.starts_with("modelopt")) {
    if (out.method.empty()) out.method = "modelopt";
    return parse_modelopt(quantization, std::move(out));
  }
  if (out.method == "fp8") {
    if (member(quantization, "moe_quant_algo") != nullptr) return parse_modelopt(quantization, std::move(out));
    if (family == "deepseek_v4") {  // its FP8 is attention's; the routed experts beside it are MXFP4
      out.algo = "MXFP4";
      NVFP4_MOE_TRY(apply_algo(out, SourceFormat::kModelOpt));
      return out;
    }
    return unsupported("quant_method fp8: FP8 experts are not NVFP4");
  }
  if (out.method == "mxfp4") {
    out.algo = "MXFP4";
    NVFP4_MOE_TRY(apply_algo(out, SourceFormat::kModelOpt));
    return out;
  }
  return unsupported(fmt::format("quant_method '{}' is not known; expected modelopt, compressed-tensors, fp8 or mxfp4",
                                 printable(out.method)));
}

}  // namespace nvfp4_moe
