#include "checkpoint/quant_fields.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

struct Refused {
  std::string_view algo;
  std::string_view reason;
};
constexpr Refused kRefused[] = {
    {"NVFP4_AWQ",
     "activations must be multiplied by pre_quant_scale first, which is not implemented"},
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
    // gpt-oss defines it as weight-only. ModelOpt writes the same word if it quantized activations
    // too, and bf16 is more precise than that.
    {"MXFP4", true, ActivationFormat::kBf16},
    {"W4A16_MXFP4", true, ActivationFormat::kBf16},
    {"W4A8_MXFP4_FP8", true, ActivationFormat::kFp8},
};

}  // namespace

Result<std::string> text_field(const Json& object, const char* key) {
  const Json* value = member(object, key);
  if (value == nullptr) return std::string();
  if (!value->is_string())
    return bad_input(fmt::format("{}: expected a string, got {}", key, describe_json(*value)));
  return value->get<std::string>();
}

Result<std::string> upper_text(const Json& object, const char* key) {
  NVFP4_MOE_ASSIGN(std::string value, text_field(object, key));
  for (char& c : value) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return value;
}
Result<std::string> lower_text(const Json& object, const char* key) {
  NVFP4_MOE_ASSIGN(std::string value, text_field(object, key));
  for (char& c : value) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return value;
}

ModuleScheme scheme_of_algo(const std::string& algo, SourceFormat nvfp4_format,
                            const std::string& field) {
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
  const auto* const refused = std::find_if(std::begin(kRefused), std::end(kRefused),
                                           [&](const Refused& row) { return row.algo == algo; });
  scheme.refusal =
      unsupported(refused != std::end(kRefused)
                      ? fmt::format("{} {}: {}", field, algo, refused->reason)
                      : fmt::format("{} '{}' is not known; expected NVFP4, W4A16_NVFP4 or MXFP4",
                                    field, printable(algo)));
  return scheme;
}

Status check_group_size(const Json& object, int64_t expected, std::string_view where) {
  const Json* value = member(object, "group_size");
  if (value == nullptr) return {};
  const std::optional<int64_t> size = exact_int64(*value);
  if (!size)
    return bad_input(
        fmt::format("{}group_size: expected an integer, got {}", where, describe_json(*value)));
  if (*size != expected) {
    return unsupported(fmt::format("{}group_size: expected {} for {}, got {}", where, expected,
                                   expected == 16 ? "NVFP4" : "MXFP4", *size));
  }
  return {};
}

std::vector<std::string> strings_of(const Json& object, const char* key) {
  std::vector<std::string> out;
  const Json* value = member(object, key);
  if (value == nullptr) return out;
  if (value->is_string()) out.push_back(value->get<std::string>());
  if (!value->is_array()) return out;
  for (const Json& entry : *value)
    if (entry.is_string()) out.push_back(entry.get<std::string>());
  return out;
}

Status ignore_all(const Json& quantization, std::initializer_list<const char*> keys,
                  ModuleRules& rules) {
  for (const char* key : keys) {
    for (const std::string& entry : strings_of(quantization, key)) {
      if (Status status = rules.ignore(entry); !status.ok()) return status.in(key);
    }
  }
  return {};
}

Result<InputActivations> input_activations(const Json& group, const std::string& name) {
  const std::string where = fmt::format("config_groups {}: ", printable(name));
  InputActivations out;
  const Json* input = member(group, "input_activations");
  if (input == nullptr) {
    out.why = where + (group.contains("input_activations") ? "input_activations is null"
                                                           : "no input_activations");
    return out;
  }
  const Json* bits_value = member(*input, "num_bits");
  const std::optional<int64_t> bits =
      bits_value == nullptr ? std::nullopt : exact_int64(*bits_value);
  if (!bits) return bad_input(where + "input_activations num_bits: missing or not an integer");
  NVFP4_MOE_ASSIGN(const std::string type, lower_text(*input, "type"));
  out.why = fmt::format("{}input_activations of {} bits{}", where, *bits,
                        type.empty() ? "" : ", " + printable(type));
  // For anything else (int8), only bf16 is precise enough among the formats here.
  const bool is_float = type.empty() || type == "float";
  if (is_float && *bits == 4) out.format = ActivationFormat::kNvfp4;
  if (is_float && *bits == 8) out.format = ActivationFormat::kFp8;
  return out;
}

}  // namespace nvfp4_moe::internal
