// Chooses the backend of a layer: by name, or the one with the highest priority that supports the
// layer and has not failed its self-check on the device (moe/kept_checks.h).
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "moe/env.h"
#include "moe/kept_checks.h"

namespace nvfp4_moe::internal {

// The self-check of a backend, for a layer on a device.
struct CheckReport {
  CheckScope scope;
  bool off = false;               // NVFP4_MOE_SELF_CHECK=off: the backend is trusted without one
  std::optional<KeptCheck> kept;  // empty: not checked yet

  bool failed() const { return kept && kept->failed(); }
  const char* state() const;  // "passed", "failed", "timed_out", "error", "unchecked", "off"
  std::string text() const;   // a clause: "its self-check on this device passed (7 step variants)"
};

// One backend in the report of `explain`: why it was or was not chosen.
struct BackendReport {
  std::string backend;
  bool chosen = false;
  std::string reason;
  bool supported = false;            // would accept the layer if forced
  std::optional<CheckReport> check;  // set if the selection depends on it
};

struct BackendSelection {
  const Backend* backend = nullptr;
  // The self-check of `backend`, or of one that has failed it and has a higher priority. Empty if
  // no backend that supports the layer has one.
  std::optional<CheckReport> check;
};

// The warning about a failed check: the kernel, what differed, the backend that is used, and what
// to do.
std::string check_warning(const CheckReport& check, const Backend& used, const DeviceFacts& device);

// The rules of the selection. The functions below apply them to this build's backends.
class BackendSelector {
 public:
  // checks: called if a backend with a self-check supports the layer, so that a layer on the host
  // asks for no driver.
  BackendSelector(std::span<const Backend* const> backends, std::function<KeptChecks&()> checks,
                  SelfCheckMode mode)
      : backends_(backends), checks_(std::move(checks)), mode_(mode) {}

  // These use kept results and run no check.
  std::vector<BackendReport> explain(const MoeConfig& config, const DeviceFacts& device,
                                     const std::string& forced) const;
  Result<BackendSelection> choose(const MoeConfig& config, const DeviceFacts& device,
                                  const std::string& forced) const;
  // For a layer that opens: runs the self-check that "auto" needs, and logs one warning for each
  // scope and device that failed. A backend that is forced by name is not checked.
  Result<BackendSelection> choose_checked(const MoeConfig& config, const DeviceFacts& device,
                                          const std::string& forced) const;

 private:
  enum class Run : bool { kNo, kYes };
  std::optional<CheckReport> check_of(const Backend& backend, const MoeConfig& config,
                                      const DeviceFacts& device, Run run) const;
  std::vector<BackendReport> reports(const MoeConfig& config, const DeviceFacts& device,
                                     const std::string& forced, Run run) const;
  Result<BackendSelection> chosen(const std::vector<BackendReport>& reports,
                                  const std::string& forced) const;
  void warn(const BackendSelection& selected, const DeviceFacts& device) const;

  std::span<const Backend* const> backends_;
  std::function<KeptChecks&()> checks_;
  SelfCheckMode mode_;
};

// Which backend runs this config on this device, and why the others do not. Runs no check.
std::vector<BackendReport> explain(const MoeConfig& config, const DeviceFacts& device,
                                   const std::string& forced = "auto");
// The backend for a layer: `forced` by name, or by priority if it is "auto". If a forced one
// declines the layer, kUnsupported with its reason: there is no fallback. Runs no check.
Result<const Backend*> choose_backend(const MoeConfig& config, const DeviceFacts& device,
                                      const std::string& forced);
// The selector for layers and linears that open. Sets the log level of `env`.
BackendSelector selector_to_open(const Env& env);
// The same for a layer that opens, as BackendSelector::choose_checked. Sets the log level of `env`.
Result<BackendSelection> choose_backend_to_open(const MoeConfig& config, const DeviceFacts& device,
                                                const std::string& forced, const Env& env);

}  // namespace nvfp4_moe::internal
