// Results of self-checks (moe/self_check.h), so that the kernels of a device are checked once.
//
// A result holds for one device, driver and library. It is kept in this process and in a file of
// the user's cache folder, which is trusted under the rules of moe/cache_folder.h. If that folder
// cannot be used, results are kept in this process only, as is a failure that names no kernel.
//
// While a check runs, the file has a mark and the process holds a lock. If the lock of a mark is
// free, a process ended in the middle of a check. That counts as a failure, because the check may
// have hung the device. If several processes need the same result at once, one of them runs the
// check and the others wait for it.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/enum_names.h"
#include "core/fork.h"
#include "moe/self_check.h"

namespace nvfp4_moe::internal {

template <>
struct EnumNames<CheckOutcome::Verdict> {
  static constexpr const char* kWhat = "verdict";
  static constexpr std::array kAll = {"passed", "failed", "timed_out", "error"};
};

using CheckRunner = std::function<CheckOutcome(const CheckScope& scope, const DeviceFacts& device,
                                               std::chrono::milliseconds limit)>;

struct KeptCheck {
  CheckOutcome outcome;
  bool ran_here = false;  // in this process

  bool failed() const { return outcome.verdict != CheckOutcome::Verdict::kPassed; }
  // "passed (7 step variants)", "failed: tcgen05_128x64: row 3 differs". Includes a warning about
  // the device if a plain kernel failed.
  std::string text() const;
};

// Any thread may call these.
class KeptChecks {
 public:
  struct Settings {
    std::string folder;           // empty: results are kept in this process only
    std::string driver, library;  // versions
    CheckRunner run = run_self_check;
    std::chrono::milliseconds limit{10000};  // the longest time for one check
    // added to the wait for a check of another process, which then writes its result
    std::chrono::milliseconds time_to_write{2000};
  };
  explicit KeptChecks(Settings settings) : settings_(std::move(settings)) {}
  static KeptChecks& of_process();

  // Ok if results can be kept in the folder, which is created if it does not exist; else kBadInput
  // or kIo with the reason.
  Status can_keep() const;

  // Runs no check and writes nothing.
  std::optional<KeptCheck> kept(const CheckScope& scope, const DeviceFacts& device);
  // All results of a device, by the name of their scope.
  std::map<std::string, KeptCheck> kept(const DeviceFacts& device);

  enum class Reuse { kKept, kOfThisProcess, kNone };
  // A result that may be reused, or that of a check, which is then kept. One check runs at a time.
  KeptCheck check(const CheckScope& scope, const DeviceFacts& device, Reuse reuse);

  // Whether this is the process's first call for the scope on this device.
  bool is_first_warning(const CheckScope& scope, const DeviceFacts& device);

 private:
  using Key = std::pair<std::string, std::string>;  // device, name of the scope
  KeptCheck check_and_write(const CheckScope& scope, const DeviceFacts& device, Reuse reuse);

  const Settings settings_;
  // Held while a check runs. fork() does not wait for that.
  ForkMutex checking_{ForkMutex::AtFork::kAbandoned};
  ForkMutex mutex_;  // guards the rest; taken after `checking_`
  std::map<Key, KeptCheck> used_;
  std::set<Key> warned_;
};

}  // namespace nvfp4_moe::internal
