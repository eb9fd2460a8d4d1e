// See json.h. Arrays and objects have a bounded depth: 256 levels if text is read, few if code
// builds them. So destruction and writing recurse.
#include "io/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/json_builder.h"

namespace nvfp4_moe::internal {
namespace {

// Whether the text needs no escapes between quotes.
bool is_plain(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte >= 0x20 && byte < 0x7F && c != '"' && c != '\\';
  });
}

// Uses a scalar nlohmann::json. It has no tree, so its destruction allocates nothing.
void write_string(const std::string& text, bool ascii, std::string& out) {
  if (is_plain(text)) {
    out += '"';
    out += text;
    out += '"';
  } else {
    out += nlohmann::json(text).dump(-1, ' ', ascii, nlohmann::json::error_handler_t::replace);
  }
}

template <class T>
void write_integer(T value, std::string& out) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

}  // namespace

Json::Json() = default;
Json::Json(std::string text) : value_(std::move(text)) {}
Json::Json(Signed number) : value_(number.value) {}
Json::Json(Unsigned number) : value_(number.value) {}
Json::Json(Real number) : value_(number.value) {}
Json::Json(Array values) : value_(std::move(values)) {}

Json::Json(std::initializer_list<Json> values) {
  const bool object = std::all_of(values.begin(), values.end(), [](const Json& value) {
    return value.is_array() && value.size() == 2 && value.front().is_string();
  });
  if (!object) {
    value_ = Array(values);
    return;
  }
  *this = Json::object();
  items().reserve(values.size());
  for (const Json& pair : values) items().push_back({pair.front().text(), pair[1]});
}

// Does not use the variant's own copy. libstdc++ 12 assumes that a variant of such types always
// holds a value, and if copying throws, it destroys what it never constructed.
Json::Json(const Json& other) {
  std::visit(
      [this](const auto& value) {
        std::remove_cvref_t<decltype(value)> copy = value;
        value_ = std::move(copy);
      },
      other.value_);
}
Json::Json(Json&&) noexcept = default;
Json& Json::operator=(const Json& other) {
  Json copy = other;
  return *this = std::move(copy);
}
Json& Json::operator=(Json&&) noexcept = default;
Json::~Json() = default;

Json Json::array() { return Json(Array()); }
Json Json::array(std::initializer_list<Json> values) { return Json(Array(values)); }

Json Json::object() {
  Json json;
  json.value_ = Object();
  return json;
}

const std::string& Json::text() const {
  static const std::string none;
  return is_string() ? std::get<std::string>(value_) : none;
}

size_t Json::size() const {
  if (is_array()) return std::get<Array>(value_).size();
  if (is_object()) return items().size();
  return is_null() ? 0 : 1;
}

const Json* Json::begin() const { return is_array() ? std::get<Array>(value_).data() : nullptr; }
const Json* Json::end() const { return is_array() ? begin() + size() : nullptr; }

void Json::push_back(Json value) {
  if (is_null()) value_ = Array();
  std::get<Array>(value_).push_back(std::move(value));
}

const Json::Object& Json::items() const {
  static const Object none;
  return is_object() ? std::get<Object>(value_) : none;
}
Json::Object& Json::items() { return std::get<Object>(value_); }

const Json* Json::find(std::string_view key) const {
  for (const Member& member : items())
    if (member.key == key) return &member.value;
  return nullptr;
}

const Json& Json::operator[](std::string_view key) const {
  static const Json null;
  const Json* found = find(key);
  return found == nullptr ? null : *found;
}

Json& Json::operator[](std::string_view key) {
  if (is_null()) value_ = Object();
  for (Member& member : items())
    if (member.key == key) return member.value;
  return items().emplace_back(Member{std::string(key), Json()}).value;
}

void Json::update(const Json& object) {
  for (const Member& member : object.items()) (*this)[member.key] = member.value;
}

Json Json::value(std::string_view key, const Json& fallback) const {
  const Json* found = find(key);
  return found == nullptr ? fallback : *found;
}
std::string Json::value(std::string_view key, const char* fallback) const {
  const Json* found = find(key);
  return found == nullptr || !found->is_string() ? fallback : found->text();
}
int64_t Json::value(std::string_view key, int64_t fallback) const {
  const Json* found = find(key);
  return found == nullptr || !found->is_number() ? fallback : found->get<int64_t>();
}

std::string Json::dump(int indent, bool ascii, bool non_finite) const {
  std::string out;
  write(out, indent, 0, ascii, non_finite);
  return out;
}

void Json::write(std::string& out, int indent, int level, bool ascii, bool non_finite) const {
  const auto break_text = [&](int at) {
    if (indent < 0) return;
    out += '\n';
    out.append(static_cast<size_t>(indent * at), ' ');
  };
  const auto list = [&](char open, const auto& entries, char close, const auto& write_entry) {
    out += open;
    bool first = true;
    for (const auto& entry : entries) {
      if (!first) out += ',';
      first = false;
      break_text(level + 1);
      write_entry(entry);
    }
    if (!first) break_text(level);
    out += close;
  };
  if (is_object()) {
    list('{', items(), '}', [&](const Member& member) {
      write_string(member.key, ascii, out);
      out += indent < 0 ? ":" : ": ";
      member.value.write(out, indent, level + 1, ascii, non_finite);
    });
  } else if (is_array()) {
    list('[', std::get<Array>(value_), ']',
         [&](const Json& element) { element.write(out, indent, level + 1, ascii, non_finite); });
  } else if (is_string()) {
    write_string(text(), ascii, out);
  } else if (is_number_unsigned()) {
    write_integer(get<uint64_t>(), out);
  } else if (is_number_integer()) {
    write_integer(get<int64_t>(), out);
  } else if (is_number()) {
    const auto value = get<double>();
    if (non_finite && !std::isfinite(value)) {
      out += std::isnan(value) ? "NaN" : value < 0 ? "-Infinity" : "Infinity";
    } else {
      out += nlohmann::json(value).dump();
    }
  } else if (is_boolean()) {
    out += get<bool>() ? "true" : "false";
  } else {
    out += is_null() ? "null" : "<discarded>";
  }
}

bool operator==(const Json& a, const Json& b) {
  if (a.is_number_integer() && b.is_number_integer()) {
    if (a.is_number_unsigned() == b.is_number_unsigned()) return a.value_ == b.value_;
    const Json& with_sign = a.is_number_unsigned() ? b : a;
    return with_sign.get<int64_t>() >= 0 && a.get<uint64_t>() == b.get<uint64_t>();
  }
  if (a.is_number() && b.is_number()) return a.get<double>() == b.get<double>();
  return a.value_ == b.value_;
}

Json Json::parse(std::string_view text, bool non_finite) {
  JsonLimits limits;
  limits.max_bytes = limits.max_members = limits.max_elements = limits.max_values =
      static_cast<size_t>(-1);
  limits.max_depth = 256;
  NonFiniteNumbers numbers;
  if (non_finite) numbers = replace_non_finite(text);
  if (!numbers.text.empty()) text = numbers.text;
  JsonBuilder builder(limits, /*strict=*/false, &numbers);
  if (parse_into(&builder, text.begin(), text.end())) return builder.take();
  Json discarded;
  discarded.value_ = Discarded();
  return discarded;
}

}  // namespace nvfp4_moe::internal
