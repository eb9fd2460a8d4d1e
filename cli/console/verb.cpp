#include "cli/console/verb.h"

#include <algorithm>
#include <string_view>

namespace nvfp4_moe::cli {

std::string shell_quoted(const std::string& argument) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-./:=,+@%").find(c) != std::string_view::npos;
  };
  if (!argument.empty() && std::all_of(argument.begin(), argument.end(), plain)) return argument;
  std::string out = "'";
  for (const char c : argument) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace nvfp4_moe::cli
