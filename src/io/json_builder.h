// Handler of nlohmann's SAX parser. It builds a Json and stops at the first value that it refuses.
//
// Private to src/io.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/json.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// Replacements of NaN, Infinity and -Infinity for text that nlohmann reads. In `text` each is a
// number of the same length that occurs nowhere else in it, so positions do not change. Words
// inside strings stay strings.
struct NonFiniteNumbers {
  std::string text;                                   // empty if the original has no such word
  std::map<std::string, double, std::less<>> values;  // stand-in -> value
};
NonFiniteNumbers replace_non_finite(std::string_view text);
// Whether the character can be part of a number or of a word such as true.
bool in_json_word(char c);

class JsonBuilder {
 public:
  // strict: refuses a repeated name in an object, and sorts members by name. Otherwise the last
  // value counts.
  JsonBuilder(const JsonLimits& limits, bool strict, const NonFiniteNumbers* numbers = nullptr)
      : limits_(limits), strict_(strict), numbers_(numbers) {}

  bool null() { return add(Json()); }
  bool boolean(bool value) { return add(Json(value)); }
  bool number_integer(int64_t value) { return add(Json(value)); }
  bool number_unsigned(uint64_t value) { return add(Json(value)); }
  bool number_float(double value, const std::string& token);
  bool string(std::string& value) { return add(Json(std::move(value))); }
  bool binary(nlohmann::json::binary_t&) { return refuse("binary values are not JSON"); }
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_object();
  bool end_array();
  bool key(std::string& name);
  bool parse_error(size_t position, const std::string& last_token,
                   const nlohmann::detail::exception& error);

  Json take() { return std::move(root_); }
  const std::string& refusal() const { return refusal_; }
  // Position of the parser: "rope_scaling.type", "time_step_limit[1]"; empty outside any object.
  std::string key_path() const;
  std::optional<size_t> position() const { return position_; }  // of a syntax error

 private:
  // An open container. `value` stays valid: its parent grows only after it is closed.
  struct Level {
    Json* value;
    size_t member = 0;                                // index of the last key's member
    std::unordered_map<std::string, size_t> by_name;  // for a large object; a small one is searched
  };
  bool refuse(std::string reason);
  Json* place(Json value);  // stores a value at the current place; null if a limit is exceeded
  bool add(Json value) { return place(std::move(value)) != nullptr; }
  bool open(Json container);

  const JsonLimits& limits_;
  const bool strict_;
  const NonFiniteNumbers* numbers_;
  Json root_;
  std::vector<Level> stack_;
  size_t values_ = 0;
  std::string refusal_;
  std::optional<size_t> position_;
};

// Whether the characters are one JSON value that the builder takes. nlohmann::json::sax_parse would
// also compile the readers of five binary formats.
template <typename Iterator>
bool parse_into(JsonBuilder* builder, Iterator begin, Iterator end) {
  auto input = nlohmann::detail::input_adapter(begin, end);
  return nlohmann::detail::parser<nlohmann::json, decltype(input)>(std::move(input))
      .sax_parse(builder);
}

}  // namespace nvfp4_moe::internal
