#include "checkpoint/model_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/config_fields.h"
#include "checkpoint/model_config.h"
#include "checkpoint/names.h"

namespace nvfp4_moe::internal {
namespace {

// Reads a list with one entry per layer. is_moe returns whether an entry means MoE.
template <class IsMoe>
Status layers_from_list(const Json& list, const char* key, int64_t count,
                        std::vector<int64_t>& layers, IsMoe is_moe) {
  if (!list.is_array() || static_cast<int64_t>(list.size()) < count) {
    return bad_input(fmt::format("config.json {}: expected a list of {}, got {}", key, count,
                                 describe_json(list)));
  }
  for (int64_t layer = 0; layer < count; ++layer) {
    const std::optional<bool> moe = is_moe(list[static_cast<size_t>(layer)]);
    if (!moe) {
      return bad_input(fmt::format("config.json {} entry {}: got {}", key, layer,
                                   describe_json(list[static_cast<size_t>(layer)])));
    }
    if (*moe) layers.push_back(layer);
  }
  return {};
}

// Reads a list of layer numbers: [3, 7, 11].
Result<std::vector<bool>> layer_set(const Json* list, const char* key, int64_t count) {
  std::vector<bool> set(static_cast<size_t>(count));
  if (list == nullptr) return set;
  if (!list->is_array()) {
    return bad_input(
        fmt::format("config.json {}: expected a list, got {}", key, describe_json(*list)));
  }
  for (const Json& entry : *list) {
    NVFP4_MOE_ASSIGN(const int64_t layer, int_in_range(entry, key, 0, count - 1));
    set[static_cast<size_t>(layer)] = true;
  }
  return set;
}

// Reads layer numbers as a list, or as a text "3,4,5", which becomes a list.
Result<Json> listed_layers(const Json& config, const char* key, std::string_view model_type) {
  const Json* value = member(config, key);
  if (value == nullptr) return missing_field(key, model_type);
  if (!value->is_string()) return *value;
  Result<Json> list = parse_json_strict("[" + value->get<std::string>() + "]");
  if (list.ok()) return list;
  return bad_input(fmt::format("config.json {}: expected numbers with commas between, got {}", key,
                               describe_json(*value)));
}

// Nemotron-H's layers, each a mixer of one kind: as a list of words, as one letter each, or both.
// Returns the words; empty if the config has neither.
Result<std::vector<std::string>> block_types(const Json& config) {
  std::vector<std::string> types;
  const char* from = nullptr;
  const auto check_count = [](const char* key, size_t count) -> Status {
    if (count <= static_cast<size_t>(kMaxModelLayers)) return {};
    return bad_input(fmt::format("config.json {}: expected at most {} layers, got {}", key,
                                 kMaxModelLayers, count));
  };
  const auto add = [&](const char* key, std::vector<std::string> read) -> Status {
    if (from != nullptr && read != types)
      return bad_input(fmt::format("config.json {}: expected the layers of {}", key, from));
    types = std::move(read);
    from = key;
    return {};
  };
  for (const char* key : {"layers_block_type", "layer_types"}) {
    const Json* list = member(config, key);
    if (list == nullptr) continue;
    if (!list->is_array()) {
      return bad_input(
          fmt::format("config.json {}: expected a list, got {}", key, describe_json(*list)));
    }
    NVFP4_MOE_TRY(check_count(key, list->size()));
    std::vector<std::string> read;
    for (const Json& entry : *list) {
      const std::string word = entry.is_string() ? entry.get<std::string>() : std::string();
      if (word == "moe" || word == "mlp") {
        read.push_back(word);
      } else if (word == "mamba" || word == "linear_attention") {
        read.push_back("mamba");
      } else if (word == "attention" || word == "full_attention") {
        read.push_back("attention");
      } else {
        return bad_input(
            fmt::format("config.json {} entry {}: got {}", key, read.size(), describe_json(entry)));
      }
    }
    NVFP4_MOE_TRY(add(key, std::move(read)));
  }
  const char* const pattern_key = "hybrid_override_pattern";
  const Json* pattern = member(config, pattern_key);
  if (pattern == nullptr) return types;
  if (!pattern->is_string()) {
    return bad_input(fmt::format("config.json {}: expected a string, got {}", pattern_key,
                                 describe_json(*pattern)));
  }
  const std::string letters = pattern->get<std::string>();
  NVFP4_MOE_TRY(check_count(pattern_key, letters.size()));
  std::vector<std::string> read;
  for (const char letter : letters) {
    switch (letter) {
      case 'M': read.push_back("mamba"); break;
      case '*': read.push_back("attention"); break;
      case '-': read.push_back("mlp"); break;
      case 'E': read.push_back("moe"); break;
      default:
        return bad_input(fmt::format("config.json {}: expected M, *, - and E, got '{}'",
                                     pattern_key, printable(std::string(1, letter))));
    }
  }
  NVFP4_MOE_TRY(add(pattern_key, std::move(read)));
  return types;
}

}  // namespace

Result<int64_t> count_layers(const Json& config, const ModelRow& row, std::string_view model_type) {
  if (row.layers != LayerRule::kBlockTypes)
    return required_int(config, {row.layer_count}, 1, kMaxModelLayers, model_type);
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> count,
                   optional_int(config, {"num_hidden_layers"}, 1, kMaxModelLayers));
  NVFP4_MOE_ASSIGN(const std::vector<std::string> types, block_types(config));
  const auto listed = static_cast<int64_t>(types.size());
  if (listed == 0) return missing_field("layers_block_type", model_type);
  if (count.value_or(listed) == listed) return listed;
  return bad_input(fmt::format(
      "config.json num_hidden_layers: expected the {} layers that the config lists, got {}", listed,
      *count));
}

Status read_layers(const Json& config, const ModelRow& row, int64_t count,
                   std::vector<int64_t>& layers) {
  if (const Json* types = member(config, "mlp_layer_types")) {
    return layers_from_list(*types, "mlp_layer_types", count, layers,
                            [](const Json& entry) -> std::optional<bool> {
                              if (entry == "dense") return false;
                              if (entry == "sparse" || entry == "moe" || entry == "hash_moe")
                                return true;
                              return std::nullopt;
                            });
  }
  const Json* freq = member(config, "moe_layer_freq");
  if (freq != nullptr && freq->is_array()) {
    return layers_from_list(*freq, "moe_layer_freq", count, layers,
                            [](const Json& entry) -> std::optional<bool> {
                              const std::optional<int64_t> number = exact_int64(entry);
                              if (!number || (*number != 0 && *number != 1)) return std::nullopt;
                              return *number == 1;
                            });
  }
  switch (row.layers) {
    case LayerRule::kAll:
      for (int64_t layer = 0; layer < count; ++layer) layers.push_back(layer);
      return {};
    case LayerRule::kFirstDense: {
      NVFP4_MOE_ASSIGN(const int64_t dense, required_int(config, {"first_k_dense_replace"}, 0,
                                                         kMaxModelLayers, row.model_type));
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> every,
                       optional_int(config, {"moe_layer_freq"}, 1, kMaxModelLayers));
      for (int64_t layer = dense; layer < count; ++layer) {
        if (layer % every.value_or(1) == 0) layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kListed: return missing_field("mlp_layer_types", row.model_type);
    case LayerRule::kDenseLayers: {
      NVFP4_MOE_ASSIGN(const int64_t dense, required_int(config, {"num_dense_layers"}, 0,
                                                         kMaxModelLayers, row.model_type));
      for (int64_t layer = dense; layer < count; ++layer) layers.push_back(layer);
      return {};
    }
    case LayerRule::kInterval: {
      NVFP4_MOE_ASSIGN(const int64_t first, required_int(config, {"moe_layer_start_index"}, 0,
                                                         kMaxModelLayers, row.model_type));
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> last,
                       optional_int(config, {"moe_layer_end_index"}, -1, kMaxModelLayers));
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> every,
                       optional_int(config, {"moe_layer_interval"}, 1, kMaxModelLayers));
      const int64_t end = last.value_or(-1) < 0 ? count : std::min(count, *last + 1);
      for (int64_t layer = first; layer < end; ++layer) {
        if ((layer + 1) % every.value_or(1) == 0) layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kPeriod: {
      NVFP4_MOE_ASSIGN(const int64_t period, required_int(config, {"expert_layer_period"}, 1,
                                                          kMaxModelLayers, row.model_type));
      NVFP4_MOE_ASSIGN(const int64_t offset, required_int(config, {"expert_layer_offset"}, 0,
                                                          period - 1, row.model_type));
      for (int64_t layer = offset; layer < count; layer += period) layers.push_back(layer);
      return {};
    }
    case LayerRule::kStep: {
      const bool listed = member(config, "moe_layers_enum") == nullptr &&
                          member(config, "moe_layer_list") != nullptr;
      const char* const key = listed ? "moe_layer_list" : "moe_layers_enum";
      NVFP4_MOE_ASSIGN(const Json list, listed_layers(config, key, row.model_type));
      NVFP4_MOE_ASSIGN(const std::vector<bool> set, layer_set(&list, key, kMaxModelLayers));
      for (int64_t layer = 0; layer < count; ++layer) {
        if (set[static_cast<size_t>(layer)]) layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kSparseStep: {
      NVFP4_MOE_ASSIGN(const std::optional<int64_t> step,
                       optional_int(config, {"decoder_sparse_step"}, 1, kMaxModelLayers));
      NVFP4_MOE_ASSIGN(const std::vector<bool> dense,
                       layer_set(member(config, "mlp_only_layers"), "mlp_only_layers", count));
      for (int64_t layer = 0; layer < count; ++layer) {
        if (!dense[static_cast<size_t>(layer)] && (layer + 1) % step.value_or(1) == 0)
          layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kBlockTypes: {
      NVFP4_MOE_ASSIGN(const std::vector<std::string> types, block_types(config));
      for (int64_t layer = 0; layer < count; ++layer) {
        if (types[static_cast<size_t>(layer)] == "moe") layers.push_back(layer);
      }
      return {};
    }
    case LayerRule::kLlama4: {
      if (const Json* list = member(config, "moe_layers")) {
        NVFP4_MOE_ASSIGN(const std::vector<bool> set, layer_set(list, "moe_layers", count));
        for (int64_t layer = 0; layer < count; ++layer) {
          if (set[static_cast<size_t>(layer)]) layers.push_back(layer);
        }
        return {};
      }
      NVFP4_MOE_ASSIGN(const int64_t step, required_int(config, {"interleave_moe_layer_step"}, 1,
                                                        kMaxModelLayers, row.model_type));
      for (int64_t layer = step - 1; layer < count; layer += step) layers.push_back(layer);
      return {};
    }
  }
  return {};
}

}  // namespace nvfp4_moe::internal
