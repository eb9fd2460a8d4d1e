// compressed-tensors' quantization_config: groups by target, and transforms.
#include <fmt/format.h>

#include "checkpoint/quant_fields.h"
#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

// One entry of compressed-tensors' config_groups.
Result<ModuleScheme> group_scheme(const Json& group, const std::string& name,
                                  const std::string& default_format) {
  const std::string where = fmt::format("config_groups {} ", printable(name));
  const Json* weights = member(group, "weights");
  ModuleScheme scheme;
  if (weights == nullptr) return scheme;
  NVFP4_MOE_ASSIGN(std::string format, lower_text(group, "format"));
  if (format.empty()) format = default_format;
  NVFP4_MOE_ASSIGN(const std::string type, lower_text(*weights, "type"));
  const Json* bits_value = member(*weights, "num_bits");
  const std::optional<int64_t> bits =
      bits_value == nullptr ? std::nullopt : exact_int64(*bits_value);
  if (!bits) return bad_input(where + "weights num_bits: missing or not an integer");
  if (*bits != 4 || type != "float") {
    scheme.algo = fmt::format("{}{}", type == "int" ? "INT" : "FP", *bits);
    scheme.refusal =
        unsupported(fmt::format("{}weights: {} experts are not NVFP4", where, scheme.algo));
    return scheme;
  }
  const bool mxfp4 = format == "mxfp4-pack-quantized";
  if (!mxfp4 && format != "nvfp4-pack-quantized" && format != "mixed-precision" &&
      !format.empty()) {
    return unsupported(
        fmt::format("{}format '{}': expected nvfp4-pack-quantized", where, printable(format)));
  }
  NVFP4_MOE_TRY(check_group_size(*weights, mxfp4 ? 32 : 16, where + "weights "));
  if (member(*weights, "group_size") == nullptr)
    return bad_input(where + "weights group_size: missing");
  if (const Json* symmetric = member(*weights, "symmetric");
      symmetric != nullptr && *symmetric != Json(true)) {
    return unsupported(where + "weights symmetric: expected true (NVFP4 has no zero points)");
  }
  NVFP4_MOE_ASSIGN(const InputActivations input, input_activations(group, name));
  constexpr const char* kAlgos[3][2] = {
      {"NVFP4", "MXFP4"}, {"W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"}, {"W4A16_NVFP4", "W4A16_MXFP4"}};
  const int row = input.format == ActivationFormat::kNvfp4 ? 0
                  : input.format == ActivationFormat::kFp8 ? 1
                                                           : 2;
  scheme.algo = kAlgos[row][mxfp4 ? 1 : 0];
  scheme.format = mxfp4 ? SourceFormat::kMxfp4 : SourceFormat::kCompressedTensors;
  scheme.activation_format = input.format;
  scheme.why = input.why;
  return scheme;
}

// Reads transforms of activations (online). Transforms of weights are already applied to the
// weights in the file.
Status read_transforms(const Json& quantization, QuantDeclaration& out) {
  const Json* transforms = member(quantization, "transform_config");
  const Json* groups = transforms == nullptr ? nullptr : member(*transforms, "config_groups");
  if (groups == nullptr || groups->empty()) return {};
  for (const auto& [name, group] : groups->items()) {
    const Json* apply = member(group, "apply");
    if (apply == nullptr || !apply->is_array())
      return bad_input(fmt::format("transform_config {} apply: expected a list", printable(name)));
    for (const Json& one : *apply) {
      NVFP4_MOE_ASSIGN(const std::string location, lower_text(one, "location"));
      if (location != "input" && location != "output") {
        const bool known = location == "weight_input" || location == "weight_output" ||
                           location == "k_cache" || location == "q_attn";
        if (known) continue;
        return unsupported(fmt::format("transform_config {} location '{}' is not known",
                                       printable(name), printable(location)));
      }
      ModuleRules rules(ModuleRules::Dialect::kCompressedTensors);
      ModuleScheme scheme;
      scheme.refusal =
          unsupported(fmt::format("transform_config {}: activations must be rotated (Hadamard) at "
                                  "the {} first, which is not implemented",
                                  printable(name), location));
      const size_t added = rules.add(std::move(scheme));
      for (const std::string& target : strings_of(one, "targets"))
        NVFP4_MOE_TRY(rules.target(target, added));
      NVFP4_MOE_TRY(ignore_all(one, {"ignore"}, rules));
      out.rotations.push_back(std::move(rules));
    }
  }
  return {};
}

}  // namespace

Result<QuantDeclaration> parse_compressed_tensors(const Json& quantization, QuantDeclaration out) {
  NVFP4_MOE_ASSIGN(const std::string format, lower_text(quantization, "format"));
  NVFP4_MOE_TRY(read_transforms(quantization, out));
  ModuleRules rules(ModuleRules::Dialect::kCompressedTensors);
  const Json* groups = member(quantization, "config_groups");
  if (groups == nullptr || (groups->is_object() && groups->empty())) {
    const bool mxfp4 = format == "mxfp4-pack-quantized";
    if (!mxfp4 && format != "nvfp4-pack-quantized")
      return out;  // only the KV cache, or nothing, is quantized
    ModuleScheme scheme = scheme_of_algo(mxfp4 ? "W4A16_MXFP4" : "W4A16_NVFP4",
                                         SourceFormat::kCompressedTensors, "format");
    scheme.why = fmt::format("format {} without config_groups", format);
    out.algo = scheme.algo;
    out.format = scheme.format;
    NVFP4_MOE_TRY(rules.target("Linear", rules.add(std::move(scheme))));
  } else if (!groups->is_object()) {
    return bad_input(
        fmt::format("config_groups: expected an object, got {}", describe_json(*groups)));
  } else {
    for (const auto& [name, group] : groups->items()) {
      NVFP4_MOE_ASSIGN(ModuleScheme scheme, group_scheme(group, name, format));
      if (scheme.algo.empty()) continue;
      if (scheme.refusal.ok() && out.algo.empty()) {
        out.algo = scheme.algo;
        out.format = scheme.format;
      }
      const size_t added = rules.add(std::move(scheme));
      for (const std::string& target : strings_of(group, "targets")) {
        if (Status status = rules.target(target, added); !status.ok())
          return status.in(fmt::format("config_groups {} targets", printable(name)));
      }
    }
  }
  NVFP4_MOE_TRY(ignore_all(quantization, {"ignore"}, rules));
  out.rules.push_back(std::move(rules));
  return out;
}

}  // namespace nvfp4_moe::internal
