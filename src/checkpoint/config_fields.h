// Checked values of config.json fields: an integer in its range, a positive number.
//
// Errors: kBadInput, with the field's name, the expected value and the actual one.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// The error for a field that the model type needs and the file lacks.
Status missing_field(const char* key, std::string_view model_type);

// Reads a number, or a per-layer list whose entries are all that number. A list of several numbers
// is kUnsupported.
Result<int64_t> int_in_range(const Json& value, const char* key, int64_t low, int64_t high);

// Reads the first of several spellings of one field; empty if the field is missing. Two that
// disagree are an error.
Result<std::optional<int64_t>> optional_int(const Json& config,
                                            std::initializer_list<const char*> keys, int64_t low,
                                            int64_t high);
Result<int64_t> required_int(const Json& config, std::initializer_list<const char*> keys,
                             int64_t low, int64_t high, std::string_view model_type);
Result<float> required_positive(const Json& config, const char* key, std::string_view model_type);

}  // namespace nvfp4_moe::internal
