// Strict JSON: nlohmann's SAX parser with a JsonBuilder that refuses more than the grammar does.
// See json_strict.h.
#include "io/json_strict.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <limits>

#include "io/files.h"
#include "io/json_builder.h"

namespace nvfp4_moe::internal {
namespace {

// Walks the text and stores its position for the handler: nlohmann reports the position of its own
// errors only.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** seen) : at_(at), seen_(seen) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** seen_;
};

// The word at a syntax error. nlohmann gives the position of the last byte read, from 1.
std::string offending_word(std::string_view text, size_t position) {
  if (position == 0 || position > text.size()) return "the end of the text";
  size_t begin = position - 1;
  size_t end = position;
  if (in_json_word(text[begin])) {
    while (begin > 0 && in_json_word(text[begin - 1])) --begin;
    while (end < text.size() && in_json_word(text[end])) ++end;
  }
  return fmt::format("'{}'", printable(text.substr(begin, end - begin), 40));
}

}  // namespace

Result<Json> parse_json_strict(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes)
    return bad_input(
        fmt::format("JSON: expected at most {} bytes, got {}", limits.max_bytes, text.size()));
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    return bad_input(fmt::format("byte {}: NUL byte in JSON", nul));
  // Reports the position; nlohmann would quote the bytes.
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos)
    return bad_input(fmt::format("byte {}: invalid UTF-8 in JSON", bad));
  NonFiniteNumbers numbers;
  if (limits.non_finite) numbers = replace_non_finite(text);
  const std::string_view read = numbers.text.empty() ? text : std::string_view(numbers.text);
  const char* seen = read.data();
  JsonBuilder builder(limits, /*strict=*/true, &numbers);
  const bool parsed = parse_into(&builder, CountingIterator(read.data(), &seen),
                                 CountingIterator(read.data() + read.size(), &seen));
  if (parsed) return builder.take();
  if (!builder.position())
    return bad_input(
        fmt::format("byte {}: {}", static_cast<size_t>(seen - read.data()), builder.refusal()));
  const std::string path = builder.key_path();
  const std::string_view reason = builder.refusal();
  constexpr std::string_view kSyntax = "syntax error ";
  return bad_input(
      fmt::format("byte {}: syntax error at {}{}: {}", *builder.position(),
                  offending_word(text, *builder.position()),
                  path.empty() ? "" : fmt::format(", key '{}'", printable(path, 100)),
                  reason.starts_with(kSyntax) ? reason.substr(kSyntax.size()) : reason));
}

Result<Json> read_json_file(const std::string& path, const JsonLimits& limits) {
  NVFP4_MOE_ASSIGN(const std::string text, read_text_file(path, limits.max_bytes));
  Result<Json> parsed = parse_json_strict(text, limits);
  if (!parsed.ok()) return parsed.status().in(printable(path, 4096));
  return parsed;
}

const Json* member(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const Json* found = object.find(key);
  return found == nullptr || found->is_null() ? nullptr : found;
}

std::optional<int64_t> exact_int64(const Json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

std::optional<float> finite_float(const Json& value) {
  if (!value.is_number()) return std::nullopt;
  const double number = value.get<double>();
  // Beyond this range the conversion is undefined behaviour.
  if (!(std::abs(number) <= double{std::numeric_limits<float>::max()})) return std::nullopt;
  return static_cast<float>(number);
}

std::string describe_json(const Json& value) {
  if (value.is_object()) return fmt::format("an object of {}", value.size());
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_string()) return fmt::format("\"{}\"", printable(value.text(), 80));
  return value.dump(-1, false, /*non_finite=*/true);
}

}  // namespace nvfp4_moe::internal
