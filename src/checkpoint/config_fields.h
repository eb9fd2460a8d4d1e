// Fields of config.json as checked values: an integer in its range, a positive number; and the
// errors that name them.
//
// Errors: kBadInput, with the field's name, what was expected and what stands there.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// A field that the model type needs and the file lacks.
Status missing_field(const char* key, std::string_view model_type);

// A number, or a list for layers whose entries are all that number; a list of several is
// kUnsupported.
Result<int64_t> int_in_range(const Json& value, const char* key, int64_t low, int64_t high);

// The first of several spellings of one field, nothing if none is there; two that disagree are an
// error.
Result<std::optional<int64_t>> optional_int(const Json& config,
                                            std::initializer_list<const char*> keys, int64_t low,
                                            int64_t high);
Result<int64_t> required_int(const Json& config, std::initializer_list<const char*> keys,
                             int64_t low, int64_t high, std::string_view model_type);
Result<float> required_positive(const Json& config, const char* key, std::string_view model_type);

}  // namespace nvfp4_moe::internal
