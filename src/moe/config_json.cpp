#include "moe/config_json.h"

#include <charconv>

#include "io/json.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

// Reading and writing share one list of fields, so no field can be written but not read.
template <class Options, class Visitor>
Status visit(Options& options, Visitor&& field) {
  NVFP4_MOE_TRY(field("num_experts", options.num_experts));
  NVFP4_MOE_TRY(field("top_k", options.top_k));
  NVFP4_MOE_TRY(field("hidden_size", options.hidden_size));
  NVFP4_MOE_TRY(field("intermediate_size", options.intermediate_size));
  NVFP4_MOE_TRY(field("activation", options.activation));
  NVFP4_MOE_TRY(field("swiglu_limit", options.swiglu_limit));
  NVFP4_MOE_TRY(field("swiglu_alpha", options.swiglu_alpha));
  NVFP4_MOE_TRY(field("activation_format", options.activation_format));
  NVFP4_MOE_TRY(field("activation_scale", options.activation_scale));
  NVFP4_MOE_TRY(field("intermediate_scale", options.intermediate_scale));
  NVFP4_MOE_TRY(field("intermediate_fixed", options.intermediate_fixed));
  NVFP4_MOE_TRY(field("max_router_weight", options.max_router_weight));
  NVFP4_MOE_TRY(field("static_headroom", options.static_headroom));
  NVFP4_MOE_TRY(field("router_weight", options.router_weight));
  NVFP4_MOE_TRY(field("row_format", options.row_format));
  NVFP4_MOE_TRY(field("batch_invariant", options.batch_invariant));
  NVFP4_MOE_TRY(field("shared_intermediate_size", options.shared_intermediate_size));
  NVFP4_MOE_TRY(field.added("situ_gate_limit", options.situ_gate_limit));
  NVFP4_MOE_TRY(field.added("situ_up_limit", options.situ_up_limit));
  return field.added("expert_biases", options.expert_biases);
}

struct Writer {
  bool every_field = false;
  Json json{};
  Status operator()(const char* name, int64_t value) { return set(name, value); }
  Status operator()(const char* name, bool value) { return set(name, value); }
  // Written only if set, so that a configuration without it keeps the text that it had before the
  // field existed.
  template <class Value>
  Status added(const char* name, const Value& value) {
    return value != Value{} || every_field ? (*this)(name, value) : Status();
  }
  // The shortest decimal that reads back as this float: 1.702, not 1.7020000219345093.
  Status operator()(const char* name, float value) {
    char text[32];
    const auto [end, error] = std::to_chars(text, text + sizeof text, value);
    double wide = static_cast<double>(value);
    if (error == std::errc()) std::from_chars(text, end, wide);
    return set(name, wide);
  }
  Status operator()(const char* name, const std::optional<float>& value) {
    return value ? (*this)(name, *value) : set(name, nullptr);
  }
  template <class Enum>
  requires std::is_enum_v<Enum> Status operator()(const char* name, Enum value) {
    return set(name, to_string(value));
  }
  Status set(const char* name, Json value) {
    json[name] = std::move(value);
    return {};
  }
};

struct Reader {
  const Json& json;
  size_t read = 0;

  Result<const Json*> get(const char* name) {
    const Json* found = json.find(name);
    if (found == nullptr)
      return bad_input(std::string("config ") + name + ": expected a value, got none");
    ++read;
    return found;
  }
  static Status wrong(const char* name, const char* expected, const Json& actual) {
    return bad_input(std::string("config ") + name + ": expected " + expected + ", got " +
                     actual.dump(-1, true).substr(0, 80));
  }
  Status operator()(const char* name, int64_t& value) {
    NVFP4_MOE_ASSIGN(const Json* json_value, get(name));
    const std::optional<int64_t> number = exact_int64(*json_value);
    if (!number) return wrong(name, "an integer", *json_value);
    value = *number;
    return {};
  }
  Status operator()(const char* name, bool& value) {
    NVFP4_MOE_ASSIGN(const Json* json_value, get(name));
    if (!json_value->is_boolean()) return wrong(name, "true or false", *json_value);
    value = json_value->get<bool>();
    return {};
  }
  template <class Value>
  Status added(const char* name, Value& value) {
    value = Value{};
    return json.find(name) == nullptr ? Status() : (*this)(name, value);
  }
  Status operator()(const char* name, float& value) {
    NVFP4_MOE_ASSIGN(const Json* json_value, get(name));
    if (!json_value->is_number()) return wrong(name, "a number", *json_value);
    const std::optional<float> number = finite_float(*json_value);
    if (!number) return wrong(name, "a finite number of float's range", *json_value);
    value = *number;
    return {};
  }
  Status operator()(const char* name, std::optional<float>& value) {
    NVFP4_MOE_ASSIGN(const Json* json_value, get(name));
    value.reset();
    if (json_value->is_null()) return {};
    --read;  // counted again below
    return (*this)(name, value.emplace());
  }
  template <class Enum>
  requires std::is_enum_v<Enum> Status operator()(const char* name, Enum& value) {
    NVFP4_MOE_ASSIGN(const Json* json_value, get(name));
    if (!json_value->is_string()) return wrong(name, "a name", *json_value);
    const auto parsed = parse<Enum>(json_value->text());
    if (!parsed.ok()) return bad_input("config " + parsed.status().message());  // names the field
    value = *parsed;
    return {};
  }
};

}  // namespace

namespace {

std::string write(const MoeOptions& options, Writer writer) {
  const Status ok = visit(options, writer);
  (void)ok;  // writing cannot fail
  return writer.json.dump();
}

}  // namespace

std::string to_json(const MoeOptions& options) { return write(options, {}); }
std::string every_field_json(const MoeOptions& options) {
  return write(options, {.every_field = true});
}

Result<MoeOptions> moe_options_from_json(std::string_view text) {
  JsonLimits limits;
  limits.max_bytes = size_t{64} << 10;
  limits.max_depth = 2;
  Result<Json> parsed = parse_json_strict(text, limits);
  if (!parsed.ok()) return parsed.status().in("config");
  const Json& json = *parsed;
  if (!json.is_object()) return bad_input("config: expected a JSON object, got something else");
  MoeOptions options;
  Reader reader{json};
  NVFP4_MOE_TRY(visit(options, reader));
  if (reader.read != json.size())
    return bad_input("config: expected " + std::to_string(reader.read) + " fields, got " +
                     std::to_string(json.size()));
  return options;
}

Json activation_scale_json(ActivationFormat format, float scale) {
  if (format == ActivationFormat::kBf16) return nullptr;
  if (format == ActivationFormat::kInt8Block) return "dynamic_block";
  if (scale == 0.0f) return "dynamic_token";
  return scale;
}

}  // namespace nvfp4_moe::internal
