#include "checkpoint/declared_experts.h"

#include <fmt/format.h>

#include <optional>

#include "checkpoint/quant_config.h"
#include "core/activation_precision.h"
#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

// The name of the module of an expert's matrix, from its tensors.
std::string module_of(const ExpertNames& names, int64_t expert, Projection projection) {
  std::string name = names.name(expert, projection, "weight");
  if (name.ends_with(".weight")) name.resize(name.size() - 7);
  return name;
}

// The scheme under a stack's own name; if the config names experts one by one, that of the first.
Result<ModuleScheme> scheme_of(QuantDeclaration& declaration, const ExpertNames& names,
                               int64_t expert, Projection projection, std::string& module) {
  module = module_of(names, expert, projection);
  NVFP4_MOE_ASSIGN(ModuleScheme scheme, declaration.of(module));
  if (names.role != TensorRole::kStacked || !scheme.algo.empty()) return scheme;
  const std::string one =
      expert_tensor_name(expert_stem(names.stem), 0, projection, names.words, false, "weight");
  return declaration.of(one.substr(0, one.size() - 7));
}

// Whether a layer may have these declarations for two matrices: both in one format that is loaded,
// both refused, or one of them not named by the config.
bool may_be_together(const ModuleScheme& a, const ModuleScheme& b) {
  if (a.algo.empty() || b.algo.empty()) return a.refusal.ok() && b.refusal.ok();
  return a.format == b.format && a.refusal.ok() == b.refusal.ok();
}

std::string shown(const ModuleScheme& scheme, const std::string& module) {
  return fmt::format("{} for '{}'", scheme.algo.empty() ? "floats" : printable(scheme.algo),
                     printable(module));
}

}  // namespace

Result<DeclaredExperts> declared_experts(const ModelInfo& model, const ExpertNames& names,
                                         std::span<const int64_t> experts) {
  std::optional<ModuleScheme> first, precise;
  std::string first_module, precise_module;
  DeclaredExperts out;
  out.gguf = model.gguf;
  if (model.gguf) return out;
  QuantDeclaration& declaration = *model.quantization;
  out.refusal = declaration.refusal;
  if (!out.refusal.ok()) return out;
  bool differ = false;
  for (const int64_t expert : experts) {
    for (const Projection projection : names.projections()) {
      std::string module;
      NVFP4_MOE_ASSIGN(const ModuleScheme scheme,
                       scheme_of(declaration, names, expert, projection, module));
      if (out.rotation.ok()) out.rotation = declaration.rotation_of(module);
      if (!first) {
        first = precise = scheme;
        first_module = precise_module = module;
        continue;
      }
      if (!may_be_together(*first, scheme)) {
        out.refusal = unsupported("experts of a layer in two formats, " +
                                  shown(*first, first_module) + " and " + shown(scheme, module));
        return out;
      }
      differ = differ || scheme.activation_format != precise->activation_format;
      if (!less_precise(precise->activation_format, scheme.activation_format)) continue;
      precise = scheme;
      precise_module = module;
    }
  }
  if (!first) return out;
  out.algo = first->algo.empty() ? precise->algo : first->algo;
  out.format = first->algo.empty() ? precise->format : first->format;
  out.refusal = first->refusal;
  out.csf = first->csf;
  out.activations.format = precise->activation_format;
  out.activations.why = precise->why;
  if (precise->why.empty())
    out.activations.why =
        fmt::format("the config declares nothing for '{}'", printable(precise_module));
  if (differ)
    out.activations.why +=
        fmt::format(" for '{}', the most precise of the layer", printable(precise_module));
  return out;
}

DeclaredActivations DeclaredExperts::activations_of(const FormatParts& parts) const {
  if (parts.format == SourceFormat::kFloat)
    return {ActivationFormat::kBf16, "the experts are floats"};
  if (!gguf) return activations;
  if (parts.input_scale.empty()) return {ActivationFormat::kBf16, "GGUF without input scales"};
  return {ActivationFormat::kNvfp4, "GGUF with input scales"};
}

Status check_declared(const ModelInfo& model, const DeclaredExperts& declared, SourceFormat found,
                      int64_t layer, const std::string& name, FindingList& findings) {
  if (model.gguf) return {};
  if (!declared.refusal.ok()) {  // floats only: other experts were refused before
    findings.add({Severity::kWarning, "declaration_ignored", -1, -1, name,
                  "experts as the config declares them",
                  "floats, which load without it: " + declared.refusal.message()});
    return {};
  }
  const SourceFormat claim = declared.algo.empty() ? SourceFormat::kFloat : declared.format;
  if (found == claim) return {};
  const bool any = model.quantization->declared();
  const std::string claimed =
      !any ? "floats, since no config file declares a quantization"
      : declared.algo.empty()
          ? "floats, since the config names no such experts"
          : fmt::format("{} as the config declares ({} {})", to_string(claim),
                        printable(model.quant_method), printable(declared.algo));
  const bool legal = any && (found == SourceFormat::kFloat || declared.algo.empty() ||
                             (claim == SourceFormat::kModelOpt && found == SourceFormat::kMxfp4));
  if (!legal) {
    return bad_input(fmt::format("layer {} {}: expected {}, got {}", layer, printable(name, 400),
                                 claimed, to_string(found)));
  }
  findings.add(
      {Severity::kWarning, "layer_in_other_format", layer, -1, name, claimed, to_string(found)});
  return {};
}

Status check_one_format(const TensorIndex& index, const ExpertNames& names, int64_t expert,
                        const FormatParts& first) {
  for (const Projection projection : names.projections()) {
    const Result<FormatParts> parts = detect_format(index, names, expert, projection);
    if (parts.ok() && parts->format == first.format) continue;
    if (!parts.ok() && parts.status().code() != Code::kUnsupported)
      continue;  // missing, and reported as missing
    return unsupported(fmt::format(
        "experts of a layer in two formats, {} and, for '{}', {}", to_string(first.format),
        printable(names.name(expert, projection, "weight"), 400),
        parts.ok() ? to_string(parts->format) : parts.status().message()));
  }
  return {};
}

Status check_shared_declaration(const ModelInfo& model, const ExpertNames& names,
                                const FormatParts& parts, const DeclaredActivations& routed) {
  constexpr int64_t kShared[] = {-1};
  NVFP4_MOE_ASSIGN(const DeclaredExperts own, declared_experts(model, names, kShared));
  const bool floats = parts.format == SourceFormat::kFloat;
  NVFP4_MOE_TRY(own.refusal_of(floats));
  if (floats || own.algo.empty() || !less_precise(routed.format, own.activations.format)) return {};
  return unsupported(fmt::format(
      "one declared with {} activations next to routed experts with {}: a layer has one "
      "activation format",
      to_string(own.activations.format), to_string(routed.format)));
}

}  // namespace nvfp4_moe::internal
