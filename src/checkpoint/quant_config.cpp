// See quant_config.h. Every refused algorithm is refused by name, with what it would take to run
// it.
#include "checkpoint/quant_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/quant_fields.h"
#include "io/files.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

bool mentions(std::string_view text, std::string_view word) {
  return text.find(word) != std::string_view::npos;
}

// Whether a name of `quantized_layers` belongs to routed experts in the layers that this library
// loads.
bool names_routed_experts(std::string_view name) {
  return mentions(name, "experts") && !mentions(name, "shared_expert") &&
         !name.starts_with("mtp.") && !mentions(name, ".mtp.");
}

// ModelOpt's MIXED_PRECISION: {"model.layers.3.mlp.experts.0.gate_proj": {"quant_algo": ...,
// "group_size": ...}, ...}
Status read_quantized_layers(const Json& quantization, QuantDeclaration& out) {
  const Json* layers = member(quantization, "quantized_layers");
  if (layers == nullptr)
    return bad_input("quantized_layers: missing, though quant_algo is MIXED_PRECISION");
  if (!layers->is_object()) {
    return bad_input(
        fmt::format("quantized_layers: expected an object, got {}", describe_json(*layers)));
  }
  ModuleRules rules(ModuleRules::Dialect::kModelOpt);
  std::map<std::string, size_t> schemes;
  for (const auto& [name, entry] : layers->items()) {
    NVFP4_MOE_ASSIGN(const std::string algo, upper_text(entry, "quant_algo"));
    const bool routed = names_routed_experts(name);
    if (algo.empty()) {
      if (routed)
        return bad_input(fmt::format("quantized_layers '{}' quant_algo: missing", printable(name)));
      continue;
    }
    auto found = schemes.find(algo);
    if (found == schemes.end()) {
      found = schemes
                  .emplace(algo, rules.add(scheme_of_algo(algo, SourceFormat::kModelOpt,
                                                          "quantized_layers: quant_algo")))
                  .first;
    }
    const ModuleScheme& scheme = rules.schemes()[found->second];
    if (routed && mentions(algo, "NVFP4"))
      NVFP4_MOE_TRY(
          check_group_size(entry, 16, fmt::format("quantized_layers '{}' ", printable(name))));
    if (routed && scheme.refusal.ok() && out.algo.empty()) {
      out.algo = algo;
      out.format = scheme.format;
    }
    NVFP4_MOE_TRY(rules.target(name, found->second));
  }
  out.rules.push_back(std::move(rules));
  return {};
}

// Reads config_groups next to ModelOpt's own algorithms. Only the activations of 4-bit float groups
// are used.
Status read_modelopt_groups(const Json& quantization, int64_t group_size, QuantDeclaration& out) {
  const Json* groups = member(quantization, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) return {};
  ModuleRules rules(ModuleRules::Dialect::kModelOpt);
  for (const auto& [name, group] : groups->items()) {
    const Json* weights = member(group, "weights");
    if (weights == nullptr) continue;
    NVFP4_MOE_TRY(check_group_size(*weights, group_size,
                                   fmt::format("config_groups {} weights ", printable(name))));
    const Json* bits = member(*weights, "num_bits");
    if (bits == nullptr || *bits != Json(4)) continue;
    NVFP4_MOE_ASSIGN(const InputActivations input, input_activations(group, name));
    ModuleScheme scheme;
    scheme.activation_format = input.format;
    scheme.why = input.why;
    const size_t added = rules.add(std::move(scheme));
    std::vector<std::string> targets = strings_of(group, "targets");
    if (targets.empty()) targets.emplace_back("Linear");
    for (const std::string& target : targets) NVFP4_MOE_TRY(rules.target(target, added));
  }
  if (!rules.schemes().empty()) out.rules.push_back(std::move(rules));
  return {};
}

// Declares one scheme for all experts except those that the config ignores.
Status declare_all(const Json& quantization, ModuleScheme scheme, QuantDeclaration& out) {
  if (scheme.refusal.ok()) out.format = scheme.format;
  out.algo = scheme.algo;
  ModuleRules rules(ModuleRules::Dialect::kModelOpt);
  const size_t added = rules.add(std::move(scheme));
  NVFP4_MOE_TRY(rules.target("Linear", added));
  NVFP4_MOE_TRY(
      ignore_all(quantization, {"ignore", "exclude_modules", "modules_to_not_convert"}, rules));
  out.rules.push_back(std::move(rules));
  return {};
}

Result<QuantDeclaration> parse_modelopt(const Json& quantization, QuantDeclaration out) {
  NVFP4_MOE_ASSIGN(const std::string moe_algo, upper_text(quantization, "moe_quant_algo"));
  NVFP4_MOE_ASSIGN(const std::string model_algo, upper_text(quantization, "quant_algo"));
  const std::string& algo = moe_algo.empty() ? model_algo : moe_algo;
  if (algo.empty()) {  // only the KV cache, or nothing, is quantized
    if (out.method.empty() || quantization.contains("quant_algo")) return out;
    return bad_input("quant_algo: missing");
  }
  if (algo == "MIXED_PRECISION") {
    NVFP4_MOE_TRY(read_quantized_layers(quantization, out));
    return out;
  }
  // MiniMax-M3.1 packs its NVFP4 experts as compressed-tensors does.
  NVFP4_MOE_ASSIGN(const std::string packing, lower_text(quantization, "moe_quant_format"));
  if (!packing.empty() && packing != "nvfp4-pack-quantized")
    return unsupported(fmt::format(
        "moe_quant_format '{}' is not known; expected nvfp4-pack-quantized", printable(packing)));
  ModuleScheme scheme = scheme_of_algo(
      algo, packing.empty() ? SourceFormat::kModelOpt : SourceFormat::kCompressedTensors,
      moe_algo.empty() ? "quant_algo" : "moe_quant_algo");
  const int64_t group = scheme.format == SourceFormat::kMxfp4 ? 32 : 16;
  const bool loads = scheme.refusal.ok();
  NVFP4_MOE_TRY(declare_all(quantization, std::move(scheme), out));
  if (!loads) return out;
  NVFP4_MOE_TRY(check_group_size(quantization, group, ""));
  NVFP4_MOE_TRY(read_modelopt_groups(quantization, group, out));
  return out;
}

Result<std::string> producer_of(const Json& quantization) {
  const Json* producer = member(quantization, "producer");
  if (producer == nullptr) return std::string();
  if (producer->is_string()) return producer->get<std::string>();
  NVFP4_MOE_ASSIGN(std::string name, text_field(*producer, "name"));
  NVFP4_MOE_ASSIGN(const std::string version, text_field(*producer, "version"));
  return version.empty() ? name : name + " " + version;
}

}  // namespace

namespace {

// The first scheme of the module, with the most precise activations of all. It has no algorithm if
// no rule names the module.
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
    scheme.refusal = bad_input(
        fmt::format("hf_quant_config.json: expected {} for '{}' as in config.json, got {}",
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

Result<QuantDeclaration> parse_quantization(const Json& quantization, std::string_view family) {
  if (!quantization.is_object()) {
    return bad_input(fmt::format("expected an object, got {}", describe_json(quantization)));
  }
  QuantDeclaration out;
  NVFP4_MOE_ASSIGN(out.method, lower_text(quantization, "quant_method"));
  NVFP4_MOE_ASSIGN(out.producer, producer_of(quantization));
  if (out.method == "compressed-tensors" || out.method == "compressed_tensors") {
    return parse_compressed_tensors(quantization, std::move(out));
  }
  if (out.method.empty() || out.method.starts_with("modelopt")) {
    NVFP4_MOE_ASSIGN(out, parse_modelopt(quantization, std::move(out)));
    if (out.method.empty() && out.declared()) out.method = "modelopt";
    return out;
  }
  if ((out.method == "fp8" || out.method == "mxfp8") &&
      member(quantization, "moe_quant_algo") != nullptr)
    return parse_modelopt(quantization, std::move(out));
  const std::string field = "quant_method " + printable(out.method);
  ModuleScheme scheme;
  if (out.method == "mxfp4" || (out.method == "fp8" && family == "deepseek_v4")) {
    scheme = scheme_of_algo("MXFP4", SourceFormat::kModelOpt, "quant_method");
    scheme.why = field;
    if (out.method ==
        "fp8") {  // of the rest of the model; its MXFP4 experts multiply FP8 activations too
      scheme.activation_format = ActivationFormat::kFp8;
      scheme.why =
          "quant_method fp8, by which deepseek_v4's MXFP4 experts multiply FP8 activations";
    }
  } else if (out.method == "fp8") {
    scheme.algo = "FP8";
    scheme.refusal =
        unsupported("quant_method fp8: FP8 experts are not NVFP4; quantize the float checkpoint");
  } else {
    scheme.refusal = unsupported(fmt::format(
        "quant_method '{}' is not known; expected modelopt, compressed-tensors or mxfp4; "
        "quantize the float checkpoint",
        printable(out.method)));
    scheme.algo = printable(out.method);
  }
  NVFP4_MOE_TRY(declare_all(quantization, std::move(scheme), out));
  return out;
}

}  // namespace nvfp4_moe::internal
