#include "moe/readiness.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>

#include "core/config.h"
#include "io/files.h"
#include "moe/kept_checks.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

bool is_gpu(std::string_view name) {  // "nvidia0", but not "nvidiactl"
  constexpr std::string_view kPrefix = "nvidia";
  if (name.size() <= kPrefix.size() || name.substr(0, kPrefix.size()) != kPrefix) return false;
  name.remove_prefix(kPrefix.size());
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
}

// The first word that begins with a digit and has a point, as in
// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023".
std::string driver_release(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    const bool digit = std::isdigit(static_cast<unsigned char>(word.front())) != 0;
    if (digit && word.find('.') != word.npos) return word;
  }
  return "";
}

bool cuda_hides_gpus() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr && (*visible == '\0' || std::string_view(visible) == "-1");
}

// The sentences about a device's kept self-checks that failed.
std::vector<std::string> failed_checks(const DeviceFacts& facts) {
  std::vector<std::string> failed;
  for (const auto& [scope, check] : KeptChecks::of_process().kept(facts))
    if (check.failed()) failed.push_back("the self-check of " + scope + " " + check.text());
  return failed;
}

DeviceBackends backends_of(const MoeConfig& config, const std::string& device,
                           const DeviceFacts& facts, const std::string& forced) {
  DeviceBackends found;
  found.device = device;
  found.name = facts.name;
  for (const BackendReport& report : explain(config, facts, forced)) {
    if (report.chosen)
      found.chosen = report.backend;
    else if (report.supported && !report.check)
      found.others.push_back(report.backend);
    else if (report.backend == "cuda" && facts.kind == DeviceKind::kCuda && forced == "auto")
      found.note = report.reason;  // of the backend that takes the oldest GPUs
  }
  if (const Backend* backend = find_backend(found.chosen); backend != nullptr)
    found.note = backend->caveat != nullptr ? backend->caveat : "";
  if (facts.kind == DeviceKind::kCuda) found.failed_checks = failed_checks(facts);
  return found;
}

// The scopes of a backend's self-checks on a device, by name.
Result<std::map<std::string, CheckScope>> scopes_of(const Backend& backend,
                                                    const DeviceFacts& device) {
  std::map<std::string, CheckScope> scopes;
  MoeOptions options;
  options.num_experts = 8;
  options.top_k = 2;
  options.hidden_size = 256;
  options.intermediate_size = 128;
  for (size_t f = 0; f < EnumNames<ActivationFormat>::kAll.size(); ++f)
    for (size_t a = 0; a < EnumNames<Activation>::kAll.size(); ++a)
      for (const bool batch_invariant : {false, true}) {
        options.activation_format = static_cast<ActivationFormat>(f);
        options.activation = static_cast<Activation>(a);
        options.batch_invariant = batch_invariant;
        options.swiglu_limit.reset();
        options.situ_gate_limit.reset();
        options.situ_up_limit.reset();
        if (has_swiglu_limit(options.activation)) options.swiglu_limit = 7.0f;
        if (options.activation == Activation::kSitu)
          options.situ_gate_limit = options.situ_up_limit = 7.0f;
        NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
        if (!backend.supports(config, device).ok()) continue;
        const CheckScope scope = CheckScope::of(backend, config);
        scopes.emplace(scope.name(), scope);
      }
  return scopes;
}

Status check_device(const std::string& name, const DeviceFacts& device,
                    const std::function<void(const DeviceCheck&)>& report) {
  for (const Backend* backend : backends()) {
    if (backend->self_check == SelfCheck::kNever) continue;
    NVFP4_MOE_ASSIGN(const auto scopes, scopes_of(*backend, device));
    for (const auto& [scope_name, scope] : scopes) {
      const KeptCheck check =
          KeptChecks::of_process().check(scope, device, KeptChecks::Reuse::kNone);
      report({name, scope_name, check.outcome});
      if (check.outcome.verdict == CheckOutcome::Verdict::kTimedOut) return {};
    }
  }
  return {};
}

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

}  // namespace

NvidiaSystem read_nvidia_system(const std::string& root) {
  NvidiaSystem system;
  const Result<std::vector<std::string>> names = list_directory(root + "/dev");
  if (names.ok())
    system.gpus = static_cast<int>(std::count_if(names->begin(), names->end(), is_gpu));
  system.driver = driver_release(root + "/proc/driver/nvidia/version");
  return system;
}

std::string driver_text() {
  std::string text = read_nvidia_system().driver;
  const CudaVersions cuda = cuda_versions();
  if (cuda.runtime != 0)
    text += (text.empty() ? "CUDA " : ", CUDA ") + cuda_version_text(cuda.driver);
  return text;
}

std::string library_text() {
  std::string text = NVFP4_MOE_VERSION;
  if (const int runtime = cuda_versions().runtime; runtime != 0)
    text += ", CUDA " + cuda_version_text(runtime) + ", kernels " + cuda_kernels_id();
  return text;
}

Status run_self_checks(const std::string& device,
                       const std::function<void(const DeviceCheck&)>& report) {
  for (int index = 0;; ++index) {
    const std::string name = device == "cpu" ? "cuda:" + std::to_string(index) : device;
    const Result<DeviceFacts> facts = device_facts(name);
    if (!facts.ok()) return device == "cpu" ? Status() : facts.status();
    NVFP4_MOE_TRY(check_device(name, *facts, report));
    if (device != "cpu") return {};
  }
}

Result<Readiness> read_readiness(const std::string& forced) {
  MoeOptions options;
  options.num_experts = 8;
  options.top_k = 2;
  options.hidden_size = 256;
  options.intermediate_size = 128;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  Readiness readiness;
  readiness.cuda = cuda_versions();
  readiness.system = read_nvidia_system();
  readiness.devices.push_back(backends_of(config, "cpu", host_facts(), forced));
  for (int index = 0;; ++index) {
    const std::string name = "cuda:" + std::to_string(index);
    const Result<DeviceFacts> facts = device_facts(name);
    if (facts.ok()) {
      readiness.devices.push_back(backends_of(config, name, *facts, forced));
      for (const Backend* backend : backends())
        if (backend->self_check == SelfCheck::kBeforeUse && backend->supports(config, *facts).ok())
          readiness.checks_not_kept = KeptChecks::of_process().can_keep().message();
      continue;
    }
    if (index == 0) readiness.gpu_error = facts.status().message();
    return readiness;
  }
}

std::string build_text(const Readiness& readiness) {
  return readiness.cuda.runtime == 0 ? "for CPUs only"
                                     : "with CUDA " + cuda_version_text(readiness.cuda.runtime);
}

std::string backends_text(const Readiness& readiness) {
  std::vector<std::string> used, others, notes;
  const auto add_once = [](std::vector<std::string>& list, const std::string& text) {
    if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(text);
  };
  // GPUs first: a host that has some is there to serve them. Equal GPUs in a row are one entry.
  std::vector<DeviceBackends> devices(readiness.devices);
  std::rotate(devices.begin(),
              std::find_if(devices.begin(), devices.end(),
                           [](const auto& one) { return one.device != "cpu"; }),
              devices.end());
  for (size_t first = 0, end = 0; first < devices.size(); first = end) {
    const DeviceBackends& one = devices[first];
    for (end = first + 1; end < devices.size() && devices[end].name == one.name &&
                          devices[end].chosen == one.chosen;)
      ++end;
    if (one.chosen.empty()) continue;
    const std::string last = end - first > 1 ? " to " + devices[end - 1].device : "";
    const bool host = one.device == "cpu";
    const Backend* backend = find_backend(one.chosen);
    std::string text = one.chosen;
    if (used.empty()) text += " will be used";
    text += host ? " on the host" : " on " + one.device + last + " (" + one.name + ")";
    if (host && backend != nullptr && backend->selection != nullptr)
      text += " (" + backend->selection() + ")";
    used.push_back(text);
    for (const std::string& other : one.others) add_once(others, other);
    if (!one.note.empty()) add_once(notes, one.chosen + ": " + one.note);
    for (size_t i = first; i < end; ++i)
      if (const std::vector<std::string>& failed = devices[i].failed_checks; !failed.empty())
        add_once(notes, failed.front() +
                            (failed.size() == 1
                                 ? ""
                                 : " (and " + std::to_string(failed.size() - 1) + " more)") +
                            "; `nvfp4-moe doctor --self-check` checks again");
  }
  if (used.empty()) return "none of this build's backends runs here";
  std::string text = joined(used, ", ");
  if (!others.empty()) text += "; " + joined(others, ", ") + " would work too";
  for (const std::string& note : notes) text += "; " + note;
  return text;
}

std::vector<std::string> missing_for_gpus(const Readiness& readiness) {
  std::vector<std::string> missing;
  const bool has_gpus = readiness.system.gpus > 0;
  if (readiness.cuda.runtime == 0) {
    if (has_gpus && !cuda_hides_gpus())
      missing.push_back(
          "this build has no GPU kernels, and this machine has an NVIDIA GPU: build it again with "
          "nvcc 12.9 or later on PATH (docs/explanation/cuda.md)");
    return missing;
  }
  if (!readiness.gpu_error.empty()) {
    const std::string problem = driver_problem(readiness.cuda, readiness.system.driver);
    const bool old_driver = readiness.cuda.driver != 0 && !problem.empty();
    if (old_driver || has_gpus) {
      if (cuda_hides_gpus())
        missing.push_back("no GPU is used, because CUDA_VISIBLE_DEVICES hides all of them");
      else
        missing.push_back(problem.empty() ? readiness.gpu_error : problem);
    }
  }
  for (const DeviceBackends& device : readiness.devices) {
    if (device.chosen.empty() && !device.note.empty())
      missing.push_back(device.device + " (" + device.name + "): " + device.note);
  }
  if (!readiness.checks_not_kept.empty())
    missing.push_back("results of self-checks are not kept, so each process checks again: " +
                      readiness.checks_not_kept);
  return missing;
}

}  // namespace nvfp4_moe::internal
