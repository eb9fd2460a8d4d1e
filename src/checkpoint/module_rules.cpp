#include "checkpoint/module_rules.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/activation_precision.h"

namespace nvfp4_moe::internal {
namespace {

// In a model's files and its config, the names of one module may differ before "layers.", since
// each library names the wrappers of the language model differently. Layers of multi-token
// prediction keep their names.
std::string_view canonical(std::string_view name) {
  if (name.starts_with("mtp.") || name.find(".mtp.") != name.npos || name.starts_with("layers."))
    return name;
  const size_t at = name.find(".layers.");
  return at == name.npos ? name : name.substr(at + 1);
}

// Classes that include linear layers.
bool is_linear_class(std::string_view target) { return target == "Linear" || target == "Module"; }

}  // namespace

const ModuleScheme& more_precise(const ModuleScheme& first, const ModuleScheme& second) {
  return less_precise(first.activation_format, second.activation_format) ? second : first;
}

size_t ModuleRules::add(ModuleScheme scheme) {
  schemes_.push_back(std::move(scheme));
  return schemes_.size() - 1;
}

Status ModuleRules::target(std::string_view target, size_t scheme) {
  const auto precise_one = [&](size_t& there) {
    if (&more_precise(schemes_[there], schemes_[scheme]) != &schemes_[there]) there = scheme;
  };
  if (is_linear_class(target)) {
    const auto [found, fresh] = of_class_.emplace(target, scheme);
    if (!fresh) precise_one(found->second);
    return {};
  }
  if (dialect_ == Dialect::kModelOpt || !target.starts_with("re:")) {
    const auto [found, fresh] = names_.emplace(canonical(target), scheme);
    if (!fresh) precise_one(found->second);
    return {};
  }
  const auto at = std::lower_bound(
      patterns_.begin(), patterns_.end(), target,
      [](const Pattern& pattern, std::string_view text) { return pattern.text < text; });
  if (at != patterns_.end() && at->text == target) {
    precise_one(at->scheme);
    return {};
  }
  NVFP4_MOE_ASSIGN(ModuleRegex regex, ModuleRegex::regex(target.substr(3)));
  digits_are_equal_ = digits_are_equal_ && regex.digits_are_equal();
  patterns_.insert(at, Pattern{std::string(target), std::move(regex), scheme});
  return {};
}

Status ModuleRules::ignore(std::string_view entry) {
  const bool globs = dialect_ == Dialect::kModelOpt;
  if (!globs && is_linear_class(entry)) {
    ignores_class_ = true;
    return {};
  }
  const bool is_pattern =
      globs ? entry.find_first_of("*?[") != entry.npos : entry.starts_with("re:");
  if (!is_pattern) {
    ignored_names_.emplace(canonical(entry));
    return {};
  }
  NVFP4_MOE_ASSIGN(ModuleRegex regex,
                   globs ? ModuleRegex::glob(entry) : ModuleRegex::regex(entry.substr(3)));
  digits_are_equal_ = digits_are_equal_ && regex.digits_are_equal();
  ignored_.push_back(Pattern{std::string(entry), std::move(regex), kIgnored});
  return {};
}

void ModuleRules::refuse_in(std::string_view file) {
  for (ModuleScheme& scheme : schemes_)
    if (!scheme.refusal.ok()) scheme.refusal = scheme.refusal.in(std::string(file));
}

size_t ModuleRules::of_name(std::string_view module) const {
  // ModelOpt: also by the name of a module that contains it.
  for (std::string_view name = canonical(module); !name.empty();) {
    if (ignored_names_.contains(name)) return kIgnored;
    if (const auto found = names_.find(name); found != names_.end()) return found->second;
    const size_t dot = name.rfind('.');
    if (dialect_ != Dialect::kModelOpt || dot == name.npos) break;
    name = name.substr(0, dot);
  }
  return kNone;
}

Result<size_t> ModuleRules::of_patterns(std::string_view module) {
  std::string key;
  if (digits_are_equal_) {
    key = module;
    for (char& c : key) c = c >= '0' && c <= '9' ? '0' : c;
    if (const auto found = seen_.find(key); found != seen_.end()) return found->second;
  }
  size_t result = kNone;
  for (const std::vector<Pattern>* list : {&ignored_, &patterns_}) {
    for (const Pattern& pattern : *list) {
      if (result != kNone) break;
      if (pattern.regex.match(module, budget_)) result = pattern.scheme;
      if (budget_ < 0)
        return unsupported(
            fmt::format("'{}': takes too long to match against all of the experts' names",
                        printable(pattern.text, 400)));
    }
  }
  if (digits_are_equal_) seen_.emplace(std::move(key), result);
  return result;
}

Result<const ModuleScheme*> ModuleRules::of(std::string_view module) {
  const ModuleScheme* const none = nullptr;
  const size_t by_name = of_name(module);
  if (by_name == kIgnored || ignores_class_) return none;
  NVFP4_MOE_ASSIGN(const size_t by_pattern, of_patterns(module));
  if (by_pattern == kIgnored) return none;
  if (by_name != kNone) return &schemes_[by_name];
  if (by_pattern != kNone) return &schemes_[by_pattern];
  return of_class_.empty() ? none : &schemes_[of_class_.begin()->second];
}

}  // namespace nvfp4_moe::internal
