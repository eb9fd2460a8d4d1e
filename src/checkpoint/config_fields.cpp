#include "checkpoint/config_fields.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/names.h"

namespace nvfp4_moe::internal {

Status missing_field(const char* key, std::string_view model_type) {
  return bad_input(
      fmt::format("config.json {}: missing, and {} needs it", key, printable(model_type)));
}

namespace {

// The number in a field, or the single number that all entries of a per-layer list have.
const Json& same_for_all(const Json& value) {
  const bool alike = value.is_array() && !value.empty() &&
                     std::all_of(value.begin(), value.end(),
                                 [&](const Json& one) { return one == value.front(); });
  return alike ? value.front() : value;
}

}  // namespace

Result<int64_t> int_in_range(const Json& listed, const char* key, int64_t low, int64_t high) {
  const Json& value = same_for_all(listed);
  if (value.is_array() && !value.empty()) {
    return unsupported(fmt::format("config.json {}: expected one number for all layers, got {}",
                                   key, describe_json(value)));
  }
  const std::optional<int64_t> number = exact_int64(value);
  if (!number || *number < low || *number > high) {
    return bad_input(fmt::format("config.json {}: expected an integer in [{}, {}], got {}", key,
                                 low, high, describe_json(value)));
  }
  return *number;
}

Result<std::optional<int64_t>> optional_int(const Json& config,
                                            std::initializer_list<const char*> keys, int64_t low,
                                            int64_t high) {
  std::optional<int64_t> out;
  const char* from = "";
  for (const char* key : keys) {
    const Json* value = member(config, key);
    if (value == nullptr) continue;
    NVFP4_MOE_ASSIGN(const int64_t number, int_in_range(*value, key, low, high));
    if (out && *out != number) {
      return bad_input(
          fmt::format("config.json {}: expected {} as in {}, got {}", key, *out, from, number));
    }
    out = number;
    from = key;
  }
  return out;
}

Result<int64_t> required_int(const Json& config, std::initializer_list<const char*> keys,
                             int64_t low, int64_t high, std::string_view model_type) {
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> value, optional_int(config, keys, low, high));
  if (!value) return missing_field(*keys.begin(), model_type);
  return *value;
}

Result<float> required_positive(const Json& config, const char* key, std::string_view model_type) {
  const Json* value = member(config, key);
  if (value == nullptr) return missing_field(key, model_type);
  const std::optional<float> number = finite_float(*value);
  if (!number || !(*number > 0))
    return bad_input(fmt::format("config.json {}: expected a positive number, got {}", key,
                                 describe_json(*value)));
  return *number;
}

}  // namespace nvfp4_moe::internal
