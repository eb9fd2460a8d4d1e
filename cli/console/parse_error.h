// Messages for command lines that cannot be parsed: the wrong word, what was expected instead, and
// what was probably meant.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace nvfp4_moe::internal::cli {

// One line for an error of app.parse. arguments: the command line's, without the program's
// name.
std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error,
                             const std::vector<std::string>& arguments);

// The candidate that differs from the word by the fewest insertions, removals, replacements and
// swaps of neighbours; empty if a third of the word and more would have to change.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace nvfp4_moe::internal::cli
