// Reads JSON from untrusted files into Json.
//
// The grammar already refuses invalid UTF-8, lone surrogates, NaN and trailing text. This also
// refuses duplicate keys, NUL bytes (nlohmann takes one for the end of input), deep nesting and
// more values than a limit. Messages are one line and start with the byte position: "byte 17:
// duplicate key 'x'". A syntax error quotes the word and the key: "byte 12: syntax error at 'None',
// key 'rope_scaling.type': ...". Members are sorted by name, so that their order does not determine
// which error is reported first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/status.h"
#include "io/json.h"

namespace nvfp4_moe::internal {

struct JsonLimits {
  size_t max_bytes = size_t{100} << 20;
  int max_depth = 32;                     // containers open at once
  size_t max_members = size_t{1} << 20;   // of one object
  size_t max_elements = size_t{1} << 20;  // of one array
  // in total; bounds memory, since `{},` is 3 bytes of text and some 80 of tree
  size_t max_values = size_t{1} << 23;
  // Accepts NaN, Infinity and -Infinity as numbers, as Python's json writes and reads them.
  // Published config.json files have them. The safetensors library refuses them in a header.
  bool non_finite = false;
};

// Errors are kBadInput.
Result<Json> parse_json_strict(std::string_view text, const JsonLimits& limits = {});
// The same for a file; the message starts with the path. kIo if it cannot be read.
Result<Json> read_json_file(const std::string& path, const JsonLimits& limits = {});

// The value under `key`; null if `object` is not an object, or the member is missing or null.
const Json* member(const Json& object, const char* key);

// The value of an integer literal that fits, otherwise nullopt: 2.0, 1e3, true and "2" are not
// integers.
std::optional<int64_t> exact_int64(const Json& value);

// A number as a float if it is within float's range: NaN, 1e300 and "2" give nullopt. Rounds to
// nearest, so tiny numbers may become 0.
std::optional<float> finite_float(const Json& value);

// Describes a value for messages: a scalar as written (strings quoted and printable), "an object of
// 3", "an array of 2".
std::string describe_json(const Json& value);

}  // namespace nvfp4_moe::internal
