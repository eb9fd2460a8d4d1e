// Strict JSON: a SAX handler that builds the tree and stops at the first thing it refuses; see json_strict.h.
#include "safetensors/json_strict.h"

#include <fmt/format.h>

#include <iterator>
#include <limits>
#include <vector>

#include "safetensors/files.h"

namespace nvfp4_moe {
namespace {

using nlohmann::json;

// Walks the text and leaves its position where the handler can see it: nlohmann tells the position of its own errors
// only.
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

class TreeBuilder {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() { return add(json(nullptr)); }
  bool boolean(bool value) { return add(json(value)); }
  bool number_integer(json::number_integer_t value) { return add(json(value)); }
  bool number_unsigned(json::number_unsigned_t value) { return add(json(value)); }
  bool number_float(json::number_float_t value, const std::string&) { return add(json(value)); }
  bool string(std::string& value) { return add(json(std::move(value))); }
  bool binary(json::binary_t&) { return refuse("binary values are not JSON"); }

  bool start_object(size_t) { return open(json::object()); }
  bool start_array(size_t) { return open(json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& name) {
    auto& object = stack_.back()->get_ref<json::object_t&>();
    if (object.size() >= limits_.max_members)
      return refuse(fmt::format("expected at most {} keys in one object", limits_.max_members));
    const auto [position, inserted] = object.try_emplace(name, nullptr);
    if (!inserted) return refuse(fmt::format("duplicate key '{}'", printable(name)));
    member_ = &position->second;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ...": keep the last part.
    std::string_view text = error.what();
    if (const size_t column = text.find("column "); column != std::string_view::npos)
      if (const size_t colon = text.find(": ", column); colon != std::string_view::npos) text.remove_prefix(colon + 2);
    if (const size_t bracket = text.find("] ");
        text.starts_with("[json.exception") && bracket != std::string_view::npos)
      text.remove_prefix(bracket + 2);
    // The text quotes what it last read, which may be a megabyte: the reason stands before it.
    position_ = position;
    return refuse(printable(text));
  }

  json take() { return std::move(root_); }
  const std::string& refusal() const { return refusal_; }
  std::optional<size_t> position() const { return position_; }

 private:
  bool refuse(std::string reason) {
    refusal_ = std::move(reason);
    return false;
  }

  // Puts a value where it belongs and returns its place, nullptr where a limit is passed.
  json* place(json value) {
    if (++values_ > limits_.max_values) {
      refuse(fmt::format("expected at most {} values", limits_.max_values));
      return nullptr;
    }
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (stack_.back()->is_object()) {
      *member_ = std::move(value);
      return member_;
    }
    auto& array = stack_.back()->get_ref<json::array_t&>();
    if (array.size() >= limits_.max_elements) {
      refuse(fmt::format("expected at most {} elements in one array", limits_.max_elements));
      return nullptr;
    }
    array.push_back(std::move(value));
    return &array.back();
  }
  bool add(json value) { return place(std::move(value)) != nullptr; }

  bool open(json container) {
    if (stack_.size() >= static_cast<size_t>(limits_.max_depth))
      return refuse(fmt::format("expected at most {} levels of nesting", limits_.max_depth));
    json* placed = place(std::move(container));
    if (placed == nullptr) return false;
    // Stays valid while open: an array grows only after its open element is closed.
    stack_.push_back(placed);
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  json root_;
  std::vector<json*> stack_;  // the open containers
  json* member_ = nullptr;    // where the value of the last key goes
  size_t values_ = 0;
  std::string refusal_;
  std::optional<size_t> position_;
};

}  // namespace

Result<json> parse_json_strict(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes)
    return bad_input(fmt::format("JSON: expected at most {} bytes, got {}", limits.max_bytes, text.size()));
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    return bad_input(fmt::format("byte {}: NUL byte in JSON", nul));
  // Said here by position; nlohmann would quote the bytes.
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos)
    return bad_input(fmt::format("byte {}: invalid UTF-8 in JSON", bad));
  const char* seen = text.data();
  TreeBuilder builder(limits);
  const bool parsed = json::sax_parse(CountingIterator(text.data(), &seen),
                                      CountingIterator(text.data() + text.size(), &seen), &builder);
  if (!parsed) {
    const size_t position = builder.position().value_or(static_cast<size_t>(seen - text.data()));
    return bad_input(fmt::format("byte {}: {}", position, builder.refusal()));
  }
  return builder.take();
}

Result<json> read_json_file(const std::string& path, const JsonLimits& limits) {
  NVFP4_MOE_ASSIGN(const std::string text, read_text_file(path, limits.max_bytes));
  Result<json> parsed = parse_json_strict(text, limits);
  if (!parsed.ok()) return parsed.status().in(printable(path, 4096));
  return parsed;
}

const json* member(const json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::optional<int64_t> exact_int64(const json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

std::string describe_json(const json& value) {
  if (value.is_object()) return fmt::format("an object of {}", value.size());
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_string()) return fmt::format("\"{}\"", printable(value.get_ref<const std::string&>(), 80));
  return value.dump();
}

}  // namespace nvfp4_moe
