#include "moe/backend_selection.h"

#include "moe/registry.h"

namespace nvfp4_moe::internal {

const char* CheckReport::state() const {
  if (off) return "off";
  return kept ? name_of(kept->outcome.verdict) : "unchecked";
}

std::string CheckReport::text() const {
  if (off) return "not checked, by NVFP4_MOE_SELF_CHECK=off";
  if (!kept) return "not checked yet: checked when the first layer opens";
  return "its self-check on this device " + kept->text();
}

std::optional<CheckReport> BackendSelector::check_of(const Backend& backend,
                                                     const MoeConfig& config,
                                                     const DeviceFacts& device, Run run) const {
  if (backend.self_check == SelfCheck::kNever) return std::nullopt;
  const bool due = mode_ == SelfCheckMode::kAlways || backend.self_check == SelfCheck::kBeforeUse;
  CheckReport report;
  report.scope = CheckScope::of(backend, config);
  if (mode_ == SelfCheckMode::kOff) {
    report.off = true;
  } else if (due && run == Run::kYes) {
    report.kept =
        checks_().check(report.scope, device,
                        mode_ == SelfCheckMode::kAlways ? KeptChecks::Reuse::kOfThisProcess
                                                        : KeptChecks::Reuse::kKept);
  } else {
    report.kept = checks_().kept(report.scope, device);
  }
  // A check that is not due counts if `doctor --self-check` has run it.
  return due || report.kept ? std::optional(report) : std::nullopt;
}

std::vector<BackendReport> BackendSelector::reports(const MoeConfig& config,
                                                    const DeviceFacts& device,
                                                    const std::string& forced, Run run) const {
  std::vector<BackendReport> reports;
  bool found = false;
  for (const Backend* backend : backends_) {
    const Status supports = backend->supports(config, device);
    BackendReport report;
    report.backend = backend->name;
    report.supported = supports.ok();
    if (!supports.ok()) {
      report.reason = supports.message();
    } else if (forced != "auto") {
      report.chosen = forced == backend->name;
      report.reason = report.chosen ? "forced by name"
                                    : "supports this layer; " + forced + " is forced by name";
      if (report.chosen) report.check = check_of(*backend, config, device, Run::kNo);
      if (report.check && !report.check->kept) report.check.reset();  // it will not be checked
    } else if (found) {
      report.reason = "supports this layer; lower priority";
    } else {
      report.check = check_of(*backend, config, device, run);
      report.chosen = !report.check || !report.check->failed();
      report.reason = report.chosen ? "highest priority of those that support this layer"
                                    : "supports this layer";
    }
    if (report.chosen && backend->selection != nullptr)
      report.reason += "; " + backend->selection();
    if (report.check) report.reason += "; " + report.check->text();
    if (report.chosen)
      for (const std::string& note : backend_notes(*backend, config->activation_format))
        report.reason += "; " + note;
    found = found || report.chosen;
    reports.push_back(std::move(report));
  }
  return reports;
}

Result<BackendSelection> BackendSelector::chosen(const std::vector<BackendReport>& reports,
                                                 const std::string& forced) const {
  BackendSelection selected;
  std::string reasons;
  for (size_t i = 0; i < reports.size(); ++i) {
    const BackendReport& report = reports[i];
    if (report.check && !(selected.check && selected.check->failed()))
      selected.check = report.check;
    if (report.chosen) {
      selected.backend = backends_[i];
      return selected;
    }
    if (forced == "auto" || forced == report.backend)
      reasons += (reasons.empty() ? "" : "; ") + report.backend + ": " + report.reason;
  }
  return unsupported("backend: none takes this layer: " + reasons);
}

std::vector<BackendReport> BackendSelector::explain(const MoeConfig& config,
                                                    const DeviceFacts& device,
                                                    const std::string& forced) const {
  return reports(config, device, forced, Run::kNo);
}

Result<BackendSelection> BackendSelector::choose(const MoeConfig& config, const DeviceFacts& device,
                                                 const std::string& forced) const {
  return chosen(reports(config, device, forced, Run::kNo), forced);
}

Result<BackendSelection> BackendSelector::choose_checked(const MoeConfig& config,
                                                         const DeviceFacts& device,
                                                         const std::string& forced) const {
  const Result<BackendSelection> selected =
      chosen(reports(config, device, forced, Run::kYes), forced);
  if (selected.ok() && selected->check && selected->check->failed()) warn(*selected, device);
  return selected;
}

void BackendSelector::warn(const BackendSelection& selected, const DeviceFacts& device) const {
  if (checks_().is_first_warning(selected.check->scope, device))
    log_line(LogLevel::kWarning, check_warning(*selected.check, *selected.backend, device));
}

std::string check_warning(const CheckReport& check, const Backend& used,
                          const DeviceFacts& device) {
  const std::string checked = check.scope.backend->name;
  std::string text = "the self-check of " + check.scope.name() + " on " + device.name + " (" +
                     to_string(device.kind) + ":" + std::to_string(device.index) + ") " +
                     check.kept->text() + "; ";
  text += &used == check.scope.backend ? checked + " is used, because it is forced by name"
                                       : std::string(used.name) + " is used instead";
  const CheckOutcome& outcome = check.kept->outcome;
  if (check.kept->ran_here && outcome.verdict == CheckOutcome::Verdict::kTimedOut &&
      !outcome.kernel.empty())
    text += "; the kernel that hangs still occupies the device: restart this process";
  return text +
         "; `nvfp4-moe doctor --self-check` checks again and prints what to report, "
         "NVFP4_MOE_SELF_CHECK=off uses " +
         checked + " without a check";
}

namespace {

BackendSelector selector_of_process() {
  const Result<Env> env = read_env();  // callers that open or plan a layer report its errors
  return {backends(), KeptChecks::of_process, env.ok() ? env->self_check : SelfCheckMode::kAuto};
}

Status check_name(const std::string& forced) {
  if (forced == "auto" || find_backend(forced) != nullptr) return {};
  return invalid_argument("backend: " + expected_backend(forced));
}

}  // namespace

std::vector<BackendReport> explain(const MoeConfig& config, const DeviceFacts& device,
                                   const std::string& forced) {
  std::vector<BackendReport> reports = selector_of_process().explain(config, device, forced);
  if (!check_name(forced).ok())
    reports.push_back(
        {forced, false, "not in this build: expected one of " + backend_names(), false, {}});
  return reports;
}

Result<const Backend*> choose_backend(const MoeConfig& config, const DeviceFacts& device,
                                      const std::string& forced) {
  NVFP4_MOE_TRY(check_name(forced));
  NVFP4_MOE_ASSIGN(const BackendSelection selected,
                   selector_of_process().choose(config, device, forced));
  return selected.backend;
}

BackendSelector selector_to_open(const Env& env) {
  set_log_level(env.log_level);
  return {backends(), KeptChecks::of_process, env.self_check};
}

Result<BackendSelection> choose_backend_to_open(const MoeConfig& config, const DeviceFacts& device,
                                                const std::string& forced, const Env& env) {
  const BackendSelector selector = selector_to_open(env);
  NVFP4_MOE_TRY(check_name(forced));
  return selector.choose_checked(config, device, forced);
}

}  // namespace nvfp4_moe::internal
