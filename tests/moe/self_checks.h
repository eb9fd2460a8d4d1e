// Self-checks without a GPU: checks are functions, and backends are tables with the reference's
// functions.
#pragma once

#include <array>
#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "moe/backend_selection.h"
#include "moe/kept_checks.h"
#include "moe/tiny.h"

namespace nvfp4_moe::internal::test {

inline Backend checked_backend(const char* name, int priority, SelfCheck self_check) {
  Backend backend = kReferenceBackend;
  backend.name = name;
  backend.priority = priority;
  backend.self_check = self_check;
  return backend;
}
inline const Backend kUntried = checked_backend("untried", 20, SelfCheck::kBeforeUse);
inline const Backend kTried = checked_backend("tried", 10, SelfCheck::kOnRequest);
inline const std::array<const Backend*, 2> kUntriedFirst = {&kUntried, &kReferenceBackend};
inline const std::array<const Backend*, 2> kTriedFirst = {&kTried, &kReferenceBackend};

inline CheckOutcome passed_check() { return {CheckOutcome::Verdict::kPassed, "", "", 7, 12.5}; }
inline CheckOutcome failed_check(CheckOutcome::Verdict verdict = CheckOutcome::Verdict::kFailed) {
  return {verdict, "tile_128x64", "row 3 column 17: expected 12, got 13", 4, 12.5};
}

// Collects the log's warnings.
class Warnings {
 public:
  Warnings() {
    set_log_level(LogLevel::kInfo);
    set_log_callback(
        [](int level, const char* text, void* lines) {
          if (level == static_cast<int>(LogLevel::kWarning))
            static_cast<std::vector<std::string>*>(lines)->push_back(text);
        },
        &lines_);
  }
  ~Warnings() { set_log_callback(nullptr, nullptr); }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

class KeptChecksTest : public testing::Test {
 protected:
  // The settings of a process whose checks end with `outcome`. `runs_` counts them.
  KeptChecks::Settings process(const CheckOutcome& outcome = passed_check()) {
    KeptChecks::Settings settings;
    settings.folder = folder_;
    settings.driver = "580.65.06";
    settings.library = "0.1.0";
    settings.limit = std::chrono::milliseconds(10000);
    settings.run = [this, outcome](const CheckScope&, const DeviceFacts&,
                                   std::chrono::milliseconds) {
      ++runs_;
      return outcome;
    };
    return settings;
  }
  std::vector<std::filesystem::path> files(const std::string& ending) const {
    std::vector<std::filesystem::path> found;
    if (!std::filesystem::exists(folder_)) return found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
      if (entry.path().string().ends_with(ending)) found.push_back(entry.path());
    return found;
  }
  static std::function<KeptChecks&()> uses(KeptChecks& checks) {
    return [&checks]() -> KeptChecks& { return checks; };
  }
  BackendSelector selector(KeptChecks& checks, SelfCheckMode mode = SelfCheckMode::kAuto) const {
    return {kUntriedFirst, uses(checks), mode};
  }

  TempDir dir_;
  std::string folder_ = dir_.file("cache/nvfp4-moe");
  const TinyLayer tiny_;
  const MoeConfig config_ = tiny_.config();
  const CheckScope scope_ = CheckScope::of(kUntried, config_);
  const DeviceFacts device_ = host_facts();
  int runs_ = 0;
};

}  // namespace nvfp4_moe::internal::test
