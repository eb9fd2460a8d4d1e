#include "cli/verbs/bench_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/console/lists.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/shared_options.h"

namespace nvfp4_moe::internal::cli {

Result<std::vector<int64_t>> token_sweep(const BenchVerb& verb) {
  Result<std::vector<int64_t>> parsed = parse_sweep(verb.tokens);
  if (!parsed.ok()) return parsed.status().in("--tokens");
  std::vector<int64_t> sweep = std::move(*parsed);
  if (*std::max_element(sweep.begin(), sweep.end()) > kMostTokens)
    return invalid_argument(fmt::format("--tokens: expected at most {}, got {}", kMostTokens,
                                        *std::max_element(sweep.begin(), sweep.end())));
  return sweep;
}

Result<std::vector<Configuration>> configurations(const BenchVerb& verb, const Report& report) {
  Result<std::vector<std::string>> backends = parse_names(report.common().backend);
  if (!backends.ok()) return backends.status().in("--backend");
  std::vector<std::string> formats = {""};  // the subject's format
  if (!verb.subject.choices.activation_format.empty()) {
    Result<std::vector<std::string>> named = parse_names(verb.subject.choices.activation_format);
    if (!named.ok()) return named.status().in("--activation-format");
    formats = *std::move(named);
  }
  std::vector<Configuration> all;
  for (const std::string& backend : *backends) {
    for (const std::string& format : formats) {
      Configuration one;
      NVFP4_MOE_ASSIGN(one.backend, wanted_backend(backend));
      SubjectOptions options = verb.subject;
      options.choices.activation_format = format;
      NVFP4_MOE_ASSIGN(one.subject, open_subject(options, CheckScales::kYes, one.backend,
                                                 report.common().device));
      all.push_back(std::move(one));
    }
  }
  return all;
}

Result<bool> check_all(const std::vector<Configuration>& all, const std::string& device,
                       uint64_t seed, Report& report) {
  bool agree = true;
  for (const Configuration& one : all) {
    NVFP4_MOE_ASSIGN(const std::string broken, disagreement(one, device, seed, report.executor()));
    if (broken.empty()) continue;
    agree = false;
    const std::string what =
        fmt::format("{}, {} activations: not timed, because it disagrees with the reference: {}",
                    one.backend, one.format(), broken);
    report.fail(what);
    report.fact("FAIL", what, Style::kBad);
  }
  return agree;
}

}  // namespace nvfp4_moe::internal::cli
