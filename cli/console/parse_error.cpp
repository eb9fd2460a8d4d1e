#include "cli/console/parse_error.h"

#include <fmt/format.h>

#include <algorithm>

namespace nvfp4_moe::internal::cli {
namespace {

// Optimal string alignment distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> costs(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        costs[i][j] = i + j;
        continue;
      }
      const size_t replaced = costs[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      costs[i][j] = std::min({costs[i - 1][j] + 1, costs[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        costs[i][j] = std::min(costs[i][j], costs[i - 2][j - 2] + 1);
    }
  }
  return costs[a.size()][b.size()];
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string meant = nearest(word, candidates);
  return meant.empty() ? "" : "; did you mean " + meant + "?";
}

std::vector<std::string> verbs_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(verb->get_name());
  return names;
}

std::vector<std::string> options_of(const CLI::App& verb) {
  std::vector<std::string> names;
  for (const CLI::Option* option : verb.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

bool is_option(const std::string& argument) { return argument.size() > 1 && argument[0] == '-'; }

std::string no_verb_text(const CLI::App& app, const std::vector<std::string>& arguments) {
  const std::vector<std::string> verbs = verbs_of(app);
  const std::string expected = fmt::format("expected one of {}", fmt::join(verbs, ", "));
  const auto word = std::find_if_not(arguments.begin(), arguments.end(), is_option);
  if (word != arguments.end())
    return fmt::format("verb: {}, got \"{}\"{}", expected, *word, did_you_mean(*word, verbs));
  if (arguments.empty()) return "verb: " + expected + ", got none";
  return fmt::format("{}: unknown before a verb; verb: {}, got none", arguments.front(), expected);
}

// CLI11 lists the words that it could not assign in reverse order.
std::string extras_text(const CLI::App& verb, const std::vector<std::string>& extras) {
  for (const std::string& word : extras) {
    if (!is_option(word)) continue;
    const std::string name = word.substr(0, word.find('='));
    return fmt::format("{}: unknown option of {}{}", name, verb.get_name(),
                       did_you_mean(name, options_of(verb)));
  }
  return fmt::format("{}: expected no further argument, got \"{}\"", verb.get_name(),
                     extras.front());
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t least = std::max<size_t>(word.size() / 3, 1) + 1;
  for (const std::string& candidate : candidates) {
    if (const size_t cost = distance(word, candidate); cost < least) {
      least = cost;
      best = candidate;
    }
  }
  return best;
}

std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error,
                             const std::vector<std::string>& arguments) {
  const auto parsed = app.get_subcommands();
  const std::string help = parsed.empty() ? "" : parsed.front()->get_name() + " ";
  std::string text = error.what();
  if (parsed.empty()) {
    text = no_verb_text(app, arguments);
  } else if (const auto extras = parsed.front()->remaining(true);
             dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !extras.empty()) {
    text = extras_text(*parsed.front(), extras);
  }
  return text + " (see nvfp4-moe " + help + "--help)";
}

}  // namespace nvfp4_moe::internal::cli
