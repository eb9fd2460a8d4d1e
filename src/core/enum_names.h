// Names of enums. Each enum has one table of names, used by to_string, parse, the checks of numbers
// that came through the C ABI, and streams (so that a failed test prints "kStatic" as "static").
//
// The names are those of docs/explanation/numerics.md. C constants, C++ enumerators, Python strings
// and command-line values are spelled after them.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <iosfwd>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/status.h"

namespace nvfp4_moe::internal {

// The names of an enum, specialized with two members. kWhat is the enum's name in a config or a
// signature. kAll has the values' names, in order from 0.
template <class Enum>
struct EnumNames;

template <class Enum>
bool is_named(Enum value) {
  return static_cast<size_t>(value) < EnumNames<Enum>::kAll.size();
}

template <class Enum>
const char* name_of(Enum value) {
  return is_named(value) ? EnumNames<Enum>::kAll[static_cast<size_t>(value)] : "?";
}

template <class Enum>
std::string legal_names() {
  std::string names;
  for (const char* name : EnumNames<Enum>::kAll)
    names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

// kInvalidArgument if the value is not in the enum. A value that came through the C ABI may be any
// integer.
template <class Enum>
Status check_named(Enum value) {
  if (is_named(value)) return {};
  return invalid_argument(std::string(EnumNames<Enum>::kWhat) + ": expected one of " +
                          legal_names<Enum>() + ", got " + std::to_string(static_cast<int>(value)));
}

// parse<E>("name"): the value, or an invalid_argument that lists the legal names. `what` names the
// argument if its name is not the enum's ("--search").
template <class Enum>
Result<Enum> parse(std::string_view name, std::string_view what = EnumNames<Enum>::kWhat) {
  for (size_t i = 0; i < EnumNames<Enum>::kAll.size(); ++i)
    if (name == EnumNames<Enum>::kAll[i]) return static_cast<Enum>(i);
  return invalid_argument(std::string(what) + ": expected one of " + legal_names<Enum>() +
                          ", got \"" + std::string(name) + "\"");
}

// Prints every enum of the library that has a to_string. Callers include <ostream>.
template <class Enum>
requires std::is_enum_v<Enum> && requires(Enum value) {
  { to_string(value) } -> std::convertible_to<const char*>;
}
std::ostream& operator<<(std::ostream& out, Enum value) { return out << to_string(value); }

}  // namespace nvfp4_moe::internal
