// The plan file's text: to_json() and its strict parser.
#include <fmt/format.h>

#include <cmath>

#include "convert/quantize_plan.h"
#include "io/files.h"
#include "io/json.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

constexpr const char* kWhat = "nvfp4-moe quantize, unfinished";
constexpr size_t kQualityValues = 6;

Json quality_values(const QuantizationQuality& q) {
  return {q.sum_sq,
          q.sum_sq_error,
          q.counts.blocks,
          q.counts.saturated_scales,
          q.counts.zero_scales,
          q.counts.saturated_codes};
}

Status wrong(const std::string& key, const char* expected, const Json* got) {
  return bad_input(fmt::format("{}: expected {}, got {}", key, expected,
                               got == nullptr ? "none" : describe_json(*got)));
}

Result<std::string> text_of(const Json& object, const char* key) {
  const Json* value = member(object, key);
  if (value == nullptr || !value->is_string()) return wrong(key, "a text", value);
  return value->get<std::string>();
}

Result<int64_t> integer_of(const Json& object, const char* key, int64_t least) {
  const Json* value = member(object, key);
  const std::optional<int64_t> number = value == nullptr ? std::nullopt : exact_int64(*value);
  if (!number || *number < least) return wrong(key, "an integer that fits", value);
  return *number;
}

Result<ContentHash> hash_of(const Json& object, const char* key) {
  NVFP4_MOE_ASSIGN(const std::string text, text_of(object, key));
  const std::optional<ContentHash> hash = content_hash_from_string(text);
  if (!hash) return wrong(key, "32 hexadecimal digits", member(object, key));
  return *hash;
}

Result<const Json*> array_of(const Json& object, const char* key) {
  const Json* value = member(object, key);
  if (value == nullptr || !value->is_array()) return wrong(key, "an array", value);
  return value;
}

Result<double> amount(const Json& value, const char* key) {
  const double number = value.is_number() ? value.get<double>() : -1;
  if (!std::isfinite(number) || number < 0)
    return wrong(key, "a finite number of at least 0", &value);
  return number;
}

Result<QuantizationQuality> quality_of(const Json& object, const char* key) {
  NVFP4_MOE_ASSIGN(const Json* values, array_of(object, key));
  if (values->size() != kQualityValues) return wrong(key, "six numbers", values);
  QuantizationQuality q;
  NVFP4_MOE_ASSIGN(q.sum_sq, amount((*values)[0], key));
  NVFP4_MOE_ASSIGN(q.sum_sq_error, amount((*values)[1], key));
  uint64_t* const counts[] = {&q.counts.blocks, &q.counts.saturated_scales, &q.counts.zero_scales,
                              &q.counts.saturated_codes};
  for (size_t i = 0; i < 4; ++i) {
    const std::optional<int64_t> count = exact_int64((*values)[2 + i]);
    if (!count || *count < 0) return wrong(key, "counts of at least 0", &(*values)[2 + i]);
    *counts[i] = static_cast<uint64_t>(*count);
  }
  return q;
}

// Parses everything that determines the bytes.
Status parse_work(const Json& json, QuantizePlan& plan) {
  NVFP4_MOE_ASSIGN(plan.version, text_of(json, "version"));
  NVFP4_MOE_ASSIGN(plan.source, text_of(json, "source"));
  NVFP4_MOE_ASSIGN(const Json* files, array_of(json, "files"));
  for (const Json& file : *files) {
    SourceFile source;
    NVFP4_MOE_ASSIGN(source.name, text_of(file, "name"));
    NVFP4_MOE_ASSIGN(const int64_t size, integer_of(file, "size_bytes", 0));
    source.size_bytes = static_cast<uint64_t>(size);
    NVFP4_MOE_ASSIGN(source.modified_ns, integer_of(file, "modified_ns", INT64_MIN));
    NVFP4_MOE_ASSIGN(source.sample, hash_of(file, "sample"));
    plan.files.push_back(std::move(source));
  }
  NVFP4_MOE_ASSIGN(plan.config, hash_of(json, "config"));
  NVFP4_MOE_ASSIGN(plan.format, text_of(json, "format"));
  NVFP4_MOE_ASSIGN(const Json* layers, array_of(json, "layers"));
  for (const Json& layer : *layers) {
    const std::optional<int64_t> number = exact_int64(layer);
    if (!number) return wrong("layers", "integers", &layer);
    plan.layers.insert(*number);
  }
  NVFP4_MOE_ASSIGN(plan.family, text_of(json, "family"));
  NVFP4_MOE_ASSIGN(plan.gate_up_order, text_of(json, "gate_up_order"));
  NVFP4_MOE_ASSIGN(plan.search, text_of(json, "search"));
  NVFP4_MOE_ASSIGN(plan.calibration, text_of(json, "calibration"));
  const Json* share = member(json, "share_gate_up_scale");
  if (share == nullptr || !share->is_boolean())
    return wrong("share_gate_up_scale", "true or false", share);
  plan.share_gate_up_scale = share->get<bool>();
  NVFP4_MOE_ASSIGN(const Json* scales, array_of(json, "input_scales"));
  for (const Json& entry : *scales) {
    NVFP4_MOE_ASSIGN(const int64_t layer, integer_of(entry, "layer", INT64_MIN));
    if (plan.input_scales.contains(layer))
      return wrong("layer", "each layer once", member(entry, "layer"));
    std::array<float, 2>& values = plan.input_scales[layer];
    const char* const keys[] = {"hidden", "intermediate"};
    for (size_t i = 0; i < 2; ++i) {
      const Json* value = member(entry, keys[i]);
      if (value == nullptr) return wrong(keys[i], "a number", value);
      const std::optional<float> number = finite_float(*value);
      if (!number || *number < 0)
        return wrong(keys[i], "a number of float's range that is at least 0", value);
      values[i] = *number;
    }
  }
  NVFP4_MOE_ASSIGN(const int64_t max_shard_bytes, integer_of(json, "max_shard_bytes", 1));
  plan.max_shard_bytes = static_cast<uint64_t>(max_shard_bytes);
  return {};
}

Status parse_done(const Json& json, QuantizePlan& plan) {
  NVFP4_MOE_ASSIGN(const Json* shards, array_of(json, "shards"));
  for (const Json& shard : *shards) {
    ShardRecord record;
    NVFP4_MOE_ASSIGN(record.name, text_of(shard, "name"));
    NVFP4_MOE_ASSIGN(record.hash, hash_of(shard, "xxh3_128"));
    plan.shards[record.name] = record;
  }
  NVFP4_MOE_ASSIGN(const Json* experts, array_of(json, "experts"));
  for (const Json& expert : *experts) {
    ExpertId id;
    NVFP4_MOE_ASSIGN(id.layer, integer_of(expert, "layer", INT64_MIN));
    NVFP4_MOE_ASSIGN(id.expert, integer_of(expert, "expert", INT64_MIN));
    ExpertQuality& quality = plan.experts[id];
    const char* const keys[] = {"gate", "up", "down"};
    for (size_t p = 0; p < 3; ++p) {
      NVFP4_MOE_ASSIGN(quality[p], quality_of(expert, keys[p]));
    }
  }
  return {};
}

}  // namespace

std::string to_json(const QuantizePlan& plan) {
  Json files = Json::array(), scales = Json::array(), shards = Json::array(),
       experts = Json::array();
  for (const SourceFile& file : plan.files)
    files.push_back({{"name", file.name},
                     {"size_bytes", file.size_bytes},
                     {"modified_ns", file.modified_ns},
                     {"sample", to_string(file.sample)}});
  for (const auto& [layer, values] : plan.input_scales)
    scales.push_back({{"layer", layer}, {"hidden", values[0]}, {"intermediate", values[1]}});
  for (const auto& [name, record] : plan.shards)
    shards.push_back({{"name", name}, {"xxh3_128", to_string(record.hash)}});
  for (const auto& [id, quality] : plan.experts)
    experts.push_back({{"layer", id.layer},
                       {"expert", id.expert},
                       {"gate", quality_values(quality[0])},
                       {"up", quality_values(quality[1])},
                       {"down", quality_values(quality[2])}});
  const Json json = {{"what", kWhat},
                     {"version", plan.version},
                     {"source", plan.source},
                     {"files", std::move(files)},
                     {"config", to_string(plan.config)},
                     {"format", plan.format},
                     {"layers", plan.layers},
                     {"family", plan.family},
                     {"gate_up_order", plan.gate_up_order},
                     {"search", plan.search},
                     {"calibration", plan.calibration},
                     {"share_gate_up_scale", plan.share_gate_up_scale},
                     {"input_scales", std::move(scales)},
                     {"max_shard_bytes", plan.max_shard_bytes},
                     {"shards", std::move(shards)},
                     {"experts", std::move(experts)}};
  return json.dump(1) + "\n";
}

Result<QuantizePlan> parse_quantize_plan(std::string_view text) {
  JsonLimits limits;
  limits.max_depth = 4;
  NVFP4_MOE_ASSIGN(const Json json, parse_json_strict(text, limits));
  if (!json.is_object()) return wrong("the plan", "an object", &json);
  NVFP4_MOE_ASSIGN(const std::string what, text_of(json, "what"));
  if (what != kWhat) return wrong("what", kWhat, member(json, "what"));
  QuantizePlan plan;
  NVFP4_MOE_TRY(parse_work(json, plan));
  NVFP4_MOE_TRY(parse_done(json, plan));
  return plan;
}

}  // namespace nvfp4_moe::internal
