// See quant_config.h. Every algorithm that is refused is refused by its name, with what it would take to run it.
#include "checkpoint/quant_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "safetensors/files.h"
#include "safetensors/json_strict.h"

namespace nvfp4_moe {
namespace {

using json = Json;
using Dialect = ModuleRules::Dialect;

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

struct Known {
  std::string_view algo;
  bool mxfp4;
  ActivationFormat activation_format;
};
constexpr Known kKnown[] = {
    {"NVFP4", false, ActivationFormat::kNvfp4},
    {"W4A16_NVFP4", false, ActivationFormat::kBf16},
    {"NVFP4A16", false, ActivationFormat::kBf16},
    {"W4A8_NVFP4_FP8", false, ActivationFormat::kFp8},
    // Weight-only by definition of gpt-oss. ModelOpt writes the same word if it quantized activations too, and bf16 is
    // more precise than that.
    {"MXFP4", true, ActivationFormat::kBf16},
    {"W4A16_MXFP4", true, ActivationFormat::kBf16},
    {"W4A8_MXFP4_FP8", true, ActivationFormat::kFp8},
};

// field: the one that names the algorithm, for messages.
ModuleScheme scheme_of(const std::string& algo, SourceFormat nvfp4_format, const std::string& field) {
  ModuleScheme scheme;
  scheme.algo = algo;
  scheme.format = nvfp4_format;
  scheme.why = fmt::format("{} {}", field, printable(algo));
  for (const Known& row : kKnown) {
    if (row.algo != algo) continue;
    if (row.mxfp4) scheme.format = SourceFormat::kMxfp4;
    scheme.activation_format = row.activation_format;
    return scheme;
  }
  const auto* const refused =
      std::find_if(std::begin(kRefused), std::end(kRefused), [&](const Refused& row) { return row.algo == algo; });
  scheme.refusal = unsupported(
      refused != std::end(kRefused)
          ? fmt::format("{} {}: {}", field, algo, refused->reason)
          : fmt::format("{} '{}' is not known; expected NVFP4, W4A16_NVFP4 or MXFP4", field, printable(algo)));
  return scheme;
}

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

bool mentions(std::string_view text, std::string_view word) { return text.find(word) != std::string_view::npos; }

// Whether a name of `quantized_layers` is of routed experts in the layers that this library loads.
bool names_routed_experts(std::string_view name) {
  return mentions(name, "experts") && !mentions(name, "shared_expert") && !name.starts_with("mtp.") &&
         !mentions(name, ".mtp.");
}

// The strings under `key`: a list, or one. Entries of other kinds say nothing about modules.
std::vector<std::string> strings(const json& object, const char* key) {
  std::vector<std::string> out;
  const json* value = member(object, key);
  if (value == nullptr) return out;
  if (value->is_string()) out.push_back(value->get<std::string>());
  if (!value->is_array()) return out;
  for (const json& entry : *value)
    if (entry.is_string()) out.push_back(entry.get<std::string>());
  return out;
}

Status ignore_all(const json& quantization, std::initializer_list<const char*> keys, ModuleRules& rules) {
  for (const char* key : keys) {
    for (const std::string& entry : strings(quantization, key)) {
      if (Status status = rules.ignore(entry); !status.ok()) return status.in(key);
    }
  }
  return {};
}

// What `input_activations` of a group says.
struct InputActivations {
  ActivationFormat format = ActivationFormat::kBf16;
  std::string why;
};
Result<InputActivations> input_activations(const json& group, const std::string& where) {
  InputActivations out;
  const json* input = member(group, "input_activations");
  if (input == nullptr) {
    out.why = where + (group.contains("input_activations") ? "input_activations is null" : "no input_activations");
    return out;
  }
  const json* bits_value = member(*input, "num_bits");
  const std::optional<int64_t> bits = bits_value == nullptr ? std::nullopt : exact_int64(*bits_value);
  if (!bits) return bad_input(where + "input_activations num_bits: missing or not an integer");
  NVFP4_MOE_ASSIGN(const std::string type, lower(*input, "type"));
  out.why = fmt::format("{}input_activations of {} bits{}", where, *bits, type.empty() ? "" : ", " + printable(type));
  // Anything else (int8) has no format here that is as precise, but for bf16.
  const bool is_float = type.empty() || type == "float";
  if (is_float && *bits == 4) out.format = ActivationFormat::kNvfp4;
  if (is_float && *bits == 8) out.format = ActivationFormat::kFp8;
  return out;
}

std::string group_place(const std::string& name) { return fmt::format("config_groups {}: ", printable(name)); }

// ModelOpt's MIXED_PRECISION: {"model.layers.3.mlp.experts.0.gate_proj": {"quant_algo": ..., "group_size": ...}, ...}
Status read_quantized_layers(const json& quantization, QuantDeclaration& out) {
  const json* layers = member(quantization, "quantized_layers");
  if (layers == nullptr) return bad_input("quantized_layers: missing, though quant_algo is MIXED_PRECISION");
  if (!layers->is_object()) {
    return bad_input(fmt::format("quantized_layers: expected an object, got {}", describe_json(*layers)));
  }
  ModuleRules rules(Dialect::kModelOpt);
  std::map<std::string, size_t> schemes;
  for (const auto& [name, entry] : layers->items()) {
    if (!mentions(name, "expert")) continue;
    NVFP4_MOE_ASSIGN(const std::string algo, upper(entry, "quant_algo"));
    const bool routed = names_routed_experts(name);
    if (algo.empty()) {
      if (routed) return bad_input(fmt::format("quantized_layers '{}' quant_algo: missing", printable(name)));
      continue;
    }
    auto found = schemes.find(algo);
    if (found == schemes.end()) {
      found = schemes.emplace(algo, rules.add(scheme_of(algo, SourceFormat::kModelOpt, "quantized_layers: quant_algo")))
                  .first;
    }
    const ModuleScheme& scheme = rules.schemes()[found->second];
    if (routed && mentions(algo, "NVFP4"))
      NVFP4_MOE_TRY(check_group_size(entry, 16, fmt::format("quantized_layers '{}' ", printable(name))));
    if (routed && scheme.refusal.ok() && out.algo.empty()) {
      out.algo = algo;
      out.format = scheme.format;
    }
    NVFP4_MOE_TRY(rules.target(name, found->second));
  }
  out.rules.push_back(std::move(rules));
  return {};
}

// config_groups beside ModelOpt's own algorithms: only the activations of 4-bit float groups are read.
Status read_modelopt_groups(const json& quantization, int64_t group_size, QuantDeclaration& out) {
  const json* groups = member(quantization, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) return {};
  ModuleRules rules(Dialect::kModelOpt);
  for (const auto& [name, group] : groups->items()) {
    const json* weights = member(group, "weights");
    if (weights == nullptr) continue;
    NVFP4_MOE_TRY(check_group_size(*weights, group_size, fmt::format("config_groups {} weights ", printable(name))));
    const json* bits = member(*weights, "num_bits");
    if (bits == nullptr || *bits != json(4)) continue;
    NVFP4_MOE_ASSIGN(const InputActivations input, input_activations(group, group_place(name)));
    ModuleScheme scheme;
    scheme.activation_format = input.format;
    scheme.why = input.why;
    const size_t added = rules.add(std::move(scheme));
    std::vector<std::string> targets = strings(group, "targets");
    if (targets.empty()) targets.emplace_back("Linear");
    for (const std::string& target : targets) NVFP4_MOE_TRY(rules.target(target, added));
  }
  if (!rules.schemes().empty()) out.rules.push_back(std::move(rules));
  return {};
}

// One scheme for all experts but those that the config ignores.
Status declare_all(const json& quantization, ModuleScheme scheme, QuantDeclaration& out) {
  if (scheme.refusal.ok()) out.format = scheme.format;
  out.algo = scheme.algo;
  ModuleRules rules(Dialect::kModelOpt);
  const size_t added = rules.add(std::move(scheme));
  NVFP4_MOE_TRY(rules.target("Linear", added));
  NVFP4_MOE_TRY(ignore_all(quantization, {"ignore", "exclude_modules", "modules_to_not_convert"}, rules));
  out.rules.push_back(std::move(rules));
  return {};
}

Result<QuantDeclaration> parse_modelopt(const json& quantization, QuantDeclaration out) {
  NVFP4_MOE_ASSIGN(const std::string moe_algo, upper(quantization, "moe_quant_algo"));
  NVFP4_MOE_ASSIGN(const std::string model_algo, upper(quantization, "quant_algo"));
  const std::string& algo = moe_algo.empty() ? model_algo : moe_algo;
  if (algo.empty()) {  // the KV cache alone, or nothing, is quantized
    if (out.method.empty() || quantization.contains("quant_algo")) return out;
    return bad_input("quant_algo: missing");
  }
  if (algo == "MIXED_PRECISION") {
    NVFP4_MOE_TRY(read_quantized_layers(quantization, out));
    return out;
  }
  ModuleScheme scheme = scheme_of(algo, SourceFormat::kModelOpt, moe_algo.empty() ? "quant_algo" : "moe_quant_algo");
  const int64_t group = scheme.format == SourceFormat::kMxfp4 ? 32 : 16;
  const bool loads = scheme.refusal.ok();
  NVFP4_MOE_TRY(declare_all(quantization, std::move(scheme), out));
  if (!loads) return out;
  NVFP4_MOE_TRY(check_group_size(quantization, group, ""));
  NVFP4_MOE_TRY(read_modelopt_groups(quantization, group, out));
  return out;
}

// One entry of compressed-tensors' config_groups.
Result<ModuleScheme> group_scheme(const json& group, const std::string& name, const std::string& default_format) {
  const std::string where = fmt::format("config_groups {} ", printable(name));
  const json* weights = member(group, "weights");
  ModuleScheme scheme;
  if (weights == nullptr) return scheme;
  NVFP4_MOE_ASSIGN(std::string format, lower(group, "format"));
  if (format.empty()) format = default_format;
  NVFP4_MOE_ASSIGN(const std::string type, lower(*weights, "type"));
  const json* bits_value = member(*weights, "num_bits");
  const std::optional<int64_t> bits = bits_value == nullptr ? std::nullopt : exact_int64(*bits_value);
  if (!bits) return bad_input(where + "weights num_bits: missing or not an integer");
  if (*bits != 4 || type != "float") {
    scheme.algo = fmt::format("{}{}", type == "int" ? "INT" : "FP", *bits);
    scheme.refusal = unsupported(fmt::format("{}weights: {} experts are not NVFP4", where, scheme.algo));
    return scheme;
  }
  const bool mxfp4 = format == "mxfp4-pack-quantized";
  if (!mxfp4 && format != "nvfp4-pack-quantized" && format != "mixed-precision" && !format.empty()) {
    return unsupported(fmt::format("{}format '{}': expected nvfp4-pack-quantized", where, printable(format)));
  }
  NVFP4_MOE_TRY(check_group_size(*weights, mxfp4 ? 32 : 16, where + "weights "));
  if (member(*weights, "group_size") == nullptr) return bad_input(where + "weights group_size: missing");
  if (const json* symmetric = member(*weights, "symmetric"); symmetric != nullptr && *symmetric != json(true)) {
    return unsupported(where + "weights symmetric: expected true (NVFP4 has no zero points)");
  }
  NVFP4_MOE_ASSIGN(const InputActivations input, input_activations(group, group_place(name)));
  constexpr const char* kAlgos[3][2] = {
      {"NVFP4", "MXFP4"}, {"W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"}, {"W4A16_NVFP4", "W4A16_MXFP4"}};
  const int row = input.format == ActivationFormat::kNvfp4 ? 0 : input.format == ActivationFormat::kFp8 ? 1 : 2;
  scheme.algo = kAlgos[row][mxfp4 ? 1 : 0];
  scheme.format = mxfp4 ? SourceFormat::kMxfp4 : SourceFormat::kCompressedTensors;
  scheme.activation_format = input.format;
  scheme.why = input.why;
  return scheme;
}

// Transforms of activations (online); those of weights are in the weights of the file already.
Status read_transforms(const json& quantization, QuantDeclaration& out) {
  const json* transforms = member(quantization, "transform_config");
  const json* groups = transforms == nullptr ? nullptr : member(*transforms, "config_groups");
  if (groups == nullptr || groups->empty()) return {};
  for (const auto& [name, group] : groups->items()) {
    const json* apply = member(group, "apply");
    if (apply == nullptr || !apply->is_array())
      return bad_input(fmt::format("transform_config {} apply: expected a list", printable(name)));
    for (const json& one : *apply) {
      NVFP4_MOE_ASSIGN(const std::string location, lower(one, "location"));
      if (location != "input" && location != "output") {
        const bool known =
            location == "weight_input" || location == "weight_output" || location == "k_cache" || location == "q_attn";
        if (known) continue;
        return unsupported(
            fmt::format("transform_config {} location '{}' is not known", printable(name), printable(location)));
      }
      ModuleRules rules(Dialect::kCompressedTensors);
      ModuleScheme scheme;
      scheme.refusal = unsupported(fmt::format(
          "transform_config {}: activations must be rotated (Hadamard) at the {} first, which is not implemented",
          printable(name), location));
      const size_t added = rules.add(std::move(scheme));
      for (const std::string& target : strings(one, "targets")) NVFP4_MOE_TRY(rules.target(target, added));
      NVFP4_MOE_TRY(ignore_all(one, {"ignore"}, rules));
      out.rotations.push_back(std::move(rules));
    }
  }
  return {};
}

Result<QuantDeclaration> parse_compressed_tensors(const json& quantization, QuantDeclaration out) {
  NVFP4_MOE_ASSIGN(const std::string format, lower(quantization, "format"));
  NVFP4_MOE_TRY(read_transforms(quantization, out));
  ModuleRules rules(Dialect::kCompressedTensors);
  const json* groups = member(quantization, "config_groups");
  if (groups == nullptr || (groups->is_object() && groups->empty())) {
    const bool mxfp4 = format == "mxfp4-pack-quantized";
    if (!mxfp4 && format != "nvfp4-pack-quantized") return out;  // the KV cache alone, or nothing, is quantized
    ModuleScheme scheme = scheme_of(mxfp4 ? "W4A16_MXFP4" : "W4A16_NVFP4", SourceFormat::kCompressedTensors, "format");
    scheme.why = fmt::format("format {} without config_groups", format);
    out.algo = scheme.algo;
    out.format = scheme.format;
    NVFP4_MOE_TRY(rules.target("Linear", rules.add(std::move(scheme))));
  } else if (!groups->is_object()) {
    return bad_input(fmt::format("config_groups: expected an object, got {}", describe_json(*groups)));
  } else {
    for (const auto& [name, group] : groups->items()) {
      NVFP4_MOE_ASSIGN(ModuleScheme scheme, group_scheme(group, name, format));
      if (scheme.algo.empty()) continue;
      if (scheme.refusal.ok() && out.algo.empty()) {
        out.algo = scheme.algo;
        out.format = scheme.format;
      }
      const size_t added = rules.add(std::move(scheme));
      for (const std::string& target : strings(group, "targets")) {
        if (Status status = rules.target(target, added); !status.ok())
          return status.in(fmt::format("config_groups {} targets", printable(name)));
      }
    }
  }
  NVFP4_MOE_TRY(ignore_all(quantization, {"ignore"}, rules));
  out.rules.push_back(std::move(rules));
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

namespace {

// The first scheme of the module, with the most precise activations of all; without an algorithm if none names it.
Result<ModuleScheme> scheme_in(std::vector<ModuleRules>& rules, std::string_view module) {
  ModuleScheme out;
  bool found = false;
  for (ModuleRules& one : rules) {
    NVFP4_MOE_ASSIGN(const ModuleScheme* const scheme, one.of(module));
    if (scheme == nullptr) continue;
    const ModuleScheme activations = found ? more_precise(out, *scheme) : *scheme;
    if (!found) out = *scheme;
    found = true;
    out.activation_format = activations.activation_format;
    out.why = activations.why;
  }
  return out;
}

}  // namespace

Result<ModuleScheme> QuantDeclaration::of(std::string_view module) {
  NVFP4_MOE_ASSIGN(ModuleScheme scheme, scheme_in(rules, module));
  NVFP4_MOE_ASSIGN(const ModuleScheme other, scheme_in(other_file, module));
  if (!scheme.algo.empty() && !other.algo.empty() && scheme.algo != other.algo) {
    scheme.refusal = bad_input(fmt::format("hf_quant_config.json: expected {} for '{}' as in config.json, got {}",
                                           printable(scheme.algo), printable(module), printable(other.algo)));
  }
  return scheme;
}

Status QuantDeclaration::rotation_of(std::string_view module) {
  NVFP4_MOE_ASSIGN(const ModuleScheme rotated, scheme_in(rotations, module));
  return rotated.refusal;
}

Status QuantDeclaration::refusal_of_all() const {
  Status first = refusal;
  for (const ModuleRules& one : rules) {
    for (const ModuleScheme& scheme : one.schemes()) {
      if (scheme.refusal.ok()) return refusal;
      if (first.ok()) first = scheme.refusal;
    }
  }
  return first;
}

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
    NVFP4_MOE_ASSIGN(out, parse_modelopt(quantization, std::move(out)));
    if (out.method.empty() && out.declared()) out.method = "modelopt";
    return out;
  }
  if (out.method == "fp8" && member(quantization, "moe_quant_algo") != nullptr)
    return parse_modelopt(quantization, std::move(out));
  const std::string field = "quant_method " + printable(out.method);
  ModuleScheme scheme;
  if (out.method == "mxfp4" || (out.method == "fp8" && family == "deepseek_v4")) {
    scheme = scheme_of("MXFP4", SourceFormat::kModelOpt, "quant_method");
    scheme.why = field;
    if (out.method == "fp8") {  // the rest of the model's; its MXFP4 experts multiply FP8 activations too
      scheme.activation_format = ActivationFormat::kFp8;
      scheme.why = "quant_method fp8, by which deepseek_v4's MXFP4 experts multiply FP8 activations";
    }
  } else if (out.method == "fp8") {
    scheme.algo = "FP8";
    scheme.refusal = unsupported("quant_method fp8: FP8 experts are not NVFP4");
  } else {
    scheme.refusal = unsupported(fmt::format(
        "quant_method '{}' is not known; expected modelopt, compressed-tensors, fp8 or mxfp4", printable(out.method)));
    scheme.algo = printable(out.method);
  }
  NVFP4_MOE_TRY(declare_all(quantization, std::move(scheme), out));
  return out;
}

}  // namespace nvfp4_moe
