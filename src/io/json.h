// Json: a JSON value whose destruction allocates nothing.
//
// nlohmann::json reads and writes the numbers and strings, but does not keep the trees: its
// destructor allocates, and ends the process if there is no memory left. Members stay in the order
// in which they were added. The interface is the part of nlohmann::ordered_json that the library
// uses. A getter that finds another type returns T().
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace nvfp4_moe::internal {

class Json {
 public:
  struct Member;  // {std::string key; Json value;}
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;

  Json();
  Json(std::nullptr_t) : Json() {}  // NOLINT: implicit by design, like all that follow
  template <std::same_as<bool> T>
  Json(T value) : value_(value) {}  // NOLINT
  template <std::signed_integral T>
  Json(T value) : Json(Signed{static_cast<int64_t>(value)}) {}  // NOLINT
  template <std::unsigned_integral T>
  requires(!std::same_as<T, bool>) Json(T value)
      : Json(Unsigned{static_cast<uint64_t>(value)}) {}  // NOLINT
  template <std::floating_point T>
  Json(T value) : Json(Real{static_cast<double>(value)}) {}  // NOLINT
  Json(const char* text) : Json(std::string(text)) {}        // NOLINT
  Json(std::string_view text) : Json(std::string(text)) {}   // NOLINT
  Json(std::string text);                                    // NOLINT
  template <class T>
  Json(const std::vector<T>& values) : Json(array_of(values)) {}  // NOLINT
  template <class T>
  Json(const std::set<T>& values) : Json(array_of(values)) {}  // NOLINT
  // An object if every value is an array of a string and something else, otherwise an array.
  Json(std::initializer_list<Json> values);

  Json(const Json&);
  Json(Json&&) noexcept;
  Json& operator=(const Json&);
  Json& operator=(Json&&) noexcept;
  ~Json();

  static Json array();
  static Json array(std::initializer_list<Json> values);
  static Json object();
  // Returns a value that is_discarded() if the text is not JSON, or nests more than 256 deep. If
  // members have the same name, the last one counts. For untrusted text use json_strict.h.
  // non_finite: as in JsonLimits.
  static Json parse(std::string_view text, bool non_finite = false);

  bool is_discarded() const { return std::holds_alternative<Discarded>(value_); }
  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_boolean() const { return std::holds_alternative<bool>(value_); }
  bool is_number_unsigned() const { return std::holds_alternative<uint64_t>(value_); }
  bool is_number_integer() const {
    return is_number_unsigned() || std::holds_alternative<int64_t>(value_);
  }
  bool is_number() const { return is_number_integer() || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  template <class T>
  T get() const {
    if constexpr (std::is_same_v<T, std::string>) {
      return text();
    } else if constexpr (std::is_same_v<T, bool>) {
      return is_boolean() && std::get<bool>(value_);
    } else {
      static_assert(std::is_arithmetic_v<T>);
      if (is_number_unsigned()) return number_as<T>(std::get<uint64_t>(value_));
      if (is_number_integer()) return number_as<T>(std::get<int64_t>(value_));
      return is_number() ? number_as<T>(std::get<double>(value_)) : T();
    }
  }
  const std::string& text() const;  // of a string; otherwise ""

  size_t size() const;  // of an array or object; 0 for null, 1 for anything else
  bool empty() const { return size() == 0; }
  // An array's elements; empty for anything else.
  const Json* begin() const;
  const Json* end() const;
  template <std::integral Index>
  const Json& operator[](Index index) const {
    return begin()[index];
  }
  template <std::integral Index>
  Json& operator[](Index index) {
    return std::get<Array>(value_)[static_cast<size_t>(index)];
  }
  const Json& front() const { return *begin(); }
  void push_back(Json value);  // null becomes an array first

  const Object& items() const;  // an object's members; empty for anything else
  Object& items();
  const Json* find(std::string_view key) const;  // null pointer if there is no such member
  bool contains(std::string_view key) const { return find(key) != nullptr; }
  const Json& operator[](std::string_view key) const;  // null value if there is no such member
  const Json& operator[](const char* key) const { return (*this)[std::string_view(key)]; }
  Json& operator[](std::string_view key);  // adds a missing member; null becomes an object first
  Json& operator[](const char* key) { return (*this)[std::string_view(key)]; }
  void update(const Json& object);  // adds and replaces members
  // The member, or `fallback` if there is none or it has another type.
  Json value(std::string_view key, const Json& fallback) const;
  std::string value(std::string_view key, const char* fallback) const;
  int64_t value(std::string_view key, int64_t fallback) const;

  // Writes without breaks, or with each member and element indented by `indent` spaces per level.
  // Bytes that are not UTF-8 are replaced. Inf and NaN become null, since JSON has no such numbers.
  // If non_finite is set, they become Infinity, -Infinity and NaN, for messages and for a
  // config.json that had them. Only Python reads that.
  std::string dump(int indent = -1, bool ascii = false, bool non_finite = false) const;

  // Numbers are equal by value.
  friend bool operator==(const Json& a, const Json& b);

 private:
  friend class JsonBuilder;
  struct Discarded {
    bool operator==(const Discarded&) const { return true; }
  };
  struct Signed {
    int64_t value;
  };
  struct Unsigned {
    uint64_t value;
  };
  struct Real {
    double value;
  };
  // Everything that makes a variant is defined in json.cpp, since Member is incomplete here.
  explicit Json(Signed number);
  explicit Json(Unsigned number);
  explicit Json(Real number);
  explicit Json(Array values);
  template <class Range>
  static Json array_of(const Range& values) {
    Array array;
    array.reserve(values.size());
    for (const auto& value : values) array.emplace_back(value);
    return Json(std::move(array));
  }
  // A number as T. T() for an integer type that cannot hold its value, since the cast would be
  // undefined.
  template <class T, class Number>
  static T number_as(Number number) {
    if constexpr (std::is_integral_v<T> && std::is_floating_point_v<Number>) {
      // the largest T plus 1, exactly
      const auto end = std::ldexp(Number{1}, std::numeric_limits<T>::digits);
      const bool fits = (std::is_signed_v<T> ? number >= -end : number > -1) && number < end;
      return fits ? static_cast<T>(number) : T();
    } else if constexpr (std::is_integral_v<T>) {
      return std::in_range<T>(number) ? static_cast<T>(number) : T();
    } else {
      return static_cast<T>(number);
    }
  }
  void write(std::string& out, int indent, int level, bool ascii, bool non_finite) const;

  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array, Object,
               Discarded>
      value_;
};

struct Json::Member {
  std::string key;
  Json value;
  bool operator==(const Member&) const = default;
};

bool operator==(const Json& a, const Json& b);

}  // namespace nvfp4_moe::internal
