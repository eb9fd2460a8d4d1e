#include "cli/verbs/self_checks.h"

#include <fmt/format.h>

#include "moe/readiness.h"

namespace nvfp4_moe::internal::cli {

Result<bool> report_self_checks(Report& report) {
  Json list = Json::array();
  bool usable = true;
  NVFP4_MOE_TRY(run_self_checks(report.common().device, [&](const DeviceCheck& check) {
    const KeptCheck kept{check.outcome, true};
    const std::string text = check.device + " " + check.scope + ": " + kept.text();
    if (kept.failed()) report.fail("self-check " + text);
    usable = usable && check.outcome.verdict != CheckOutcome::Verdict::kTimedOut;
    report.fact("check", fmt::format("{}, {:.1f} ms", text, check.outcome.milliseconds),
                kept.failed() ? Style::kBad : Style::kGood);
    list.push_back({{"device", check.device},
                    {"scope", check.scope},
                    {"verdict", name_of(check.outcome.verdict)},
                    {"kernel", check.outcome.kernel},
                    {"difference", check.outcome.difference},
                    {"step_variants", check.outcome.step_variants},
                    {"milliseconds", check.outcome.milliseconds}});
  }));
  if (list.empty()) report.fact("check", "no backend with a self-check runs on a GPU here");
  report.json()["self_check"] = list;
  return usable;
}

std::optional<KeptCheck> failed_self_check(const Backend& backend, const MoeConfig& config,
                                           const DeviceFacts& device) {
  if (backend.self_check == SelfCheck::kNever) return std::nullopt;
  KeptChecks& checks = KeptChecks::of_process();
  const CheckScope scope = CheckScope::of(backend, config);
  const std::optional<KeptCheck> check = backend.self_check == SelfCheck::kBeforeUse
                                             ? checks.check(scope, device, KeptChecks::Reuse::kKept)
                                             : checks.kept(scope, device);
  return check && check->failed() ? check : std::nullopt;
}

}  // namespace nvfp4_moe::internal::cli
