#include "convert/input_scales.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "io/files.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

constexpr size_t kMostBytes = size_t{16} << 20;
constexpr size_t kNamedLayers = 8;  // most layers listed in a message

std::string names(const std::vector<int64_t>& layers) {
  std::string text;
  for (size_t i = 0; i < std::min(layers.size(), kNamedLayers); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", layers[i]);
  if (layers.size() > kNamedLayers)
    text += fmt::format(" and {} more", layers.size() - kNamedLayers);
  return text;
}

bool contains(const std::vector<int64_t>& layers, int64_t layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

// Reads a scale of one layer; nullopt for null.
Result<std::optional<float>> scale_of(const Json& entry, int64_t layer, const char* key) {
  const Json* const value = entry.find(key);
  if (value == nullptr)
    return bad_input(fmt::format("layer {}: expected {}, got none", layer, key));
  if (value->is_null()) return std::optional<float>();
  const std::optional<float> scale = finite_float(*value);
  if (!scale || !(*scale >= 0x1p-126f))
    return bad_input(fmt::format(
        "layer {}: {}: expected a positive normal number of float's range, or null, got {}", layer,
        key, describe_json(*value)));
  return scale;
}

}  // namespace

Result<std::map<int64_t, LayerScales>> parse_input_scales(std::string_view text,
                                                          const std::vector<int64_t>& layers,
                                                          const std::vector<int64_t>& needed) {
  JsonLimits limits;
  limits.max_bytes = kMostBytes;
  NVFP4_MOE_ASSIGN(const Json json, parse_json_strict(text, limits));
  const Json* const entries = member(json, "layers");
  if (entries == nullptr || !entries->is_array())
    return bad_input(R"(expected the output of nvfp4-moe calibrate --json, got no array "layers")");
  if (const Json* const schema = member(json, "schema");
      schema != nullptr && exact_int64(*schema) != 1)
    return bad_input("schema: expected 1, got " + describe_json(*schema));
  std::map<int64_t, LayerScales> scales;
  for (const Json& entry : *entries) {
    const Json* const number = member(entry, "layer");
    const std::optional<int64_t> layer = number == nullptr ? std::nullopt : exact_int64(*number);
    if (!layer)
      return bad_input("layer: expected an integer, got " +
                       (number == nullptr ? "none" : describe_json(*number)));
    if (!contains(layers, *layer))
      return bad_input(fmt::format("layer {}: the checkpoint has no such MoE layer", *layer));
    LayerScales value;
    NVFP4_MOE_ASSIGN(value.hidden, scale_of(entry, *layer, "hidden_scale"));
    NVFP4_MOE_ASSIGN(value.intermediate, scale_of(entry, *layer, "intermediate_scale"));
    if (!scales.emplace(*layer, value).second)
      return bad_input(fmt::format("layer {}: expected each layer once, got it again", *layer));
  }
  std::vector<int64_t> missing;
  for (const int64_t layer : needed)
    if (!scales.contains(layer)) missing.push_back(layer);
  if (!missing.empty())
    return bad_input(fmt::format(
        "layer {}: expected scales of all {} layers that are quantized, got none: calibrate it "
        "too, or give it null scales, which stand for 1.0",
        names(missing), needed.size()));
  return scales;
}

Result<std::map<int64_t, LayerScales>> read_input_scales(const std::string& path,
                                                         const std::vector<int64_t>& layers,
                                                         const std::vector<int64_t>& needed) {
  NVFP4_MOE_ASSIGN(const std::string text, read_text_file(path, kMostBytes));
  auto scales = parse_input_scales(text, layers, needed);
  if (!scales.ok()) return scales.status().in(printable(path, 4096));
  return scales;
}

}  // namespace nvfp4_moe::internal
