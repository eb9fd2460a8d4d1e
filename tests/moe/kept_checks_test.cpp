// Results of self-checks: kept and reused, a failure that falls back, a check that was killed,
// processes at once, damaged files, folders that cannot be used. No GPU: checks are functions, and
// backends are tables with the reference's functions.
#include "moe/kept_checks.h"

#include <sys/stat.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "moe/readiness.h"
#include "moe/tiny.h"
#include "support/as_nobody.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
namespace fs = std::filesystem;
using std::chrono::milliseconds;
using Reuse = KeptChecks::Reuse;
using Verdict = CheckOutcome::Verdict;

Backend like_reference(const char* name, int priority, SelfCheck self_check) {
  Backend backend = kReferenceBackend;
  backend.name = name;
  backend.priority = priority;
  backend.self_check = self_check;
  return backend;
}
const Backend kUntried = like_reference("untried", 20, SelfCheck::kBeforeUse);
const Backend kTried = like_reference("tried", 10, SelfCheck::kOnRequest);
const std::array<const Backend*, 2> kUntriedFirst = {&kUntried, &kReferenceBackend};
const std::array<const Backend*, 2> kTriedFirst = {&kTried, &kReferenceBackend};

CheckOutcome passed() { return {Verdict::kPassed, "", "", 7, 12.5}; }
CheckOutcome failed(Verdict verdict = Verdict::kFailed) {
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
  KeptChecks::Settings process(const CheckOutcome& outcome = passed()) {
    KeptChecks::Settings settings;
    settings.folder = folder_;
    settings.driver = "580.65.06";
    settings.library = "0.1.0";
    settings.limit = milliseconds(10000);
    settings.run = [this, outcome](const CheckScope&, const DeviceFacts&, milliseconds) {
      ++runs_;
      return outcome;
    };
    return settings;
  }
  std::vector<fs::path> files(const std::string& ending) const {
    std::vector<fs::path> found;
    if (!fs::exists(folder_)) return found;
    for (const auto& entry : fs::directory_iterator(folder_))
      if (entry.path().string().ends_with(ending)) found.push_back(entry.path());
    return found;
  }
  BackendChooser chooser(KeptChecks& checks, SelfCheckMode mode = SelfCheckMode::kAuto) const {
    return {kUntriedFirst, checks, mode};
  }

  TempDir dir_;
  std::string folder_ = dir_.file("cache/nvfp4-moe");
  const TinyLayer tiny_;
  const MoeConfig config_ = tiny_.config();
  const CheckScope scope_ = CheckScope::of(kUntried, config_);
  const DeviceFacts device_ = host_facts();
  int runs_ = 0;
};

TEST_F(KeptChecksTest, PassedIsKeptAndNotRunAgain) {
  KeptChecks first(process());
  EXPECT_EQ(first.kept(scope_, device_), std::nullopt);
  EXPECT_TRUE(first.check(scope_, device_, Reuse::kKept).ran_here);
  first.check(scope_, device_, Reuse::kKept);
  EXPECT_EQ(runs_, 1);
  KeptChecks second(process(failed()));
  for (const auto& result : {second.kept(scope_, device_),
                             std::optional(second.check(scope_, device_, Reuse::kKept))}) {
    ASSERT_TRUE(result);
    EXPECT_FALSE(result->failed());
    EXPECT_FALSE(result->ran_here);
    EXPECT_EQ(result->outcome.kernels, 7);
    EXPECT_EQ(result->outcome.milliseconds, 12.5);
  }
  EXPECT_EQ(runs_, 1);
  // Another scope has a result of its own, in the same file.
  CheckScope other = scope_;
  other.format = ActivationFormat::kBf16;
  EXPECT_TRUE(second.check(other, device_, Reuse::kKept).failed());
  EXPECT_EQ(runs_, 2);
  EXPECT_EQ(KeptChecks(process()).kept(device_).size(), 2u);
  EXPECT_EQ(files(".json").size(), 1u);
  struct stat facts {};
  ASSERT_EQ(stat(folder_.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
}

TEST_F(KeptChecksTest, AFailureFallsBackWithOneWarning) {
  const Warnings warnings;
  KeptChecks checks(process(failed()));
  for (int layer = 0; layer < 60; ++layer) {
    const auto choice = must(chooser(checks).choose_checked(config_, device_, "auto"));
    EXPECT_EQ(choice->backend, &kReferenceBackend);
  }
  EXPECT_EQ(runs_, 1);
  ASSERT_EQ(warnings.lines().size(), 1u);
  for (const std::string& words :
       {"the self-check of " + scope_.name() + " on ", device_.name + " (cpu:0)",
        std::string("failed: tile_128x64: row 3 column 17: expected 12, got 13; reference is used "
                    "instead; `nvfp4-moe doctor --self-check`"),
        std::string("NVFP4_MOE_SELF_CHECK=off uses untried without a check")})
    EXPECT_THAT(warnings.lines()[0], HasSubstr(words));
  EXPECT_THAT(warnings.lines()[0], testing::Not(HasSubstr("restart")));

  KeptChecks next(process());
  EXPECT_EQ(must(chooser(next).choose_checked(config_, device_, "auto"))->backend,
            &kReferenceBackend);
  EXPECT_EQ(runs_, 1);
  EXPECT_EQ(warnings.lines().size(), 2u);
}

TEST_F(KeptChecksTest, ALayerAndExplainNameTheFailure) {
  KeptChecks checks(process(failed()));
  const auto choice = must(chooser(checks).choose_checked(config_, device_, "auto"));
  const auto layer = open_tiny(tiny_, tiny_layer_options(), choice->backend);
  EXPECT_TRUE(nlohmann::json::parse(layer->describe_json())["self_check"].is_null());
  layer->set_self_check(choice->check);
  EXPECT_EQ(nlohmann::json::parse(layer->describe_json())["self_check"],
            nlohmann::json({{"scope", scope_.name()},
                            {"state", "failed"},
                            {"kernel", "tile_128x64"},
                            {"difference", "row 3 column 17: expected 12, got 13"}}));
  const auto reports = chooser(checks).explain(config_, device_, "auto");
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_FALSE(reports[0].chosen);
  EXPECT_TRUE(reports[0].supported);
  EXPECT_EQ(reports[0].reason,
            "supports this layer; its self-check on this device failed: tile_128x64: row 3 column "
            "17: expected 12, got 13");
  EXPECT_TRUE(reports[1].chosen);
  // If no other backend takes the layer, the error has the reason.
  const std::array<const Backend*, 1> only = {&kUntried};
  EXPECT_THAT(BackendChooser(only, checks, SelfCheckMode::kAuto)
                  .choose_checked(config_, device_, "auto"),
              Refused(Code::kUnsupported, "its self-check on this device failed: tile_128x64"));
}

TEST_F(KeptChecksTest, AKernelThatHangsAsksForARestartInItsOwnProcess) {
  const Warnings warnings;
  KeptChecks checks(process(failed(Verdict::kTimedOut))), next(process());
  for (KeptChecks* process : {&checks, &next})
    EXPECT_EQ(must(chooser(*process).choose_checked(config_, device_, "auto"))->backend,
              &kReferenceBackend);
  EXPECT_EQ(runs_, 1);
  ASSERT_EQ(warnings.lines().size(), 2u);
  constexpr const char* kRestart = "still occupies the device: restart this process";
  EXPECT_THAT(warnings.lines()[0], AllOf(HasSubstr("timed out: tile_128x64"), HasSubstr(kRestart)));
  EXPECT_THAT(warnings.lines()[1], testing::Not(HasSubstr(kRestart)));
}

TEST_F(KeptChecksTest, PlansAndForcedBackendsRunNoCheck) {
  const Warnings warnings;
  KeptChecks checks(process(failed()));
  const auto reports = chooser(checks).explain(config_, device_, "auto");
  EXPECT_TRUE(reports[0].chosen);
  EXPECT_THAT(reports[0].reason,
              HasSubstr("; not checked yet: checked when the first layer opens"));
  EXPECT_EQ(must(chooser(checks).choose(config_, device_, "auto"))->backend, &kUntried);
  EXPECT_EQ(must(chooser(checks).choose_checked(config_, device_, "untried"))->check, std::nullopt);
  EXPECT_EQ(runs_, 0);
  EXPECT_TRUE(warnings.lines().empty());
  EXPECT_FALSE(fs::exists(folder_));

  checks.check(scope_, device_, Reuse::kKept);
  for (int layer = 0; layer < 2; ++layer)
    EXPECT_EQ(must(chooser(checks).choose_checked(config_, device_, "untried"))->backend,
              &kUntried);
  ASSERT_EQ(warnings.lines().size(), 1u);
  EXPECT_THAT(warnings.lines()[0], HasSubstr("untried is used, because it is forced by name"));
  EXPECT_EQ(must(chooser(checks).choose(config_, device_, "auto"))->backend, &kReferenceBackend);
}

TEST_F(KeptChecksTest, OffTrustsAndAlwaysChecksInEachProcess) {
  KeptChecks checks(process(failed()));
  checks.check(scope_, device_, Reuse::kKept);
  const auto off = must(
      chooser(checks, SelfCheckMode::kOff).choose_checked(config_, device_, "auto"));
  EXPECT_EQ(off->backend, &kUntried);
  EXPECT_STREQ(off->check->state(), "off");
  EXPECT_THAT(chooser(checks, SelfCheckMode::kOff).explain(config_, device_, "auto")[0].reason,
              HasSubstr("not checked, by NVFP4_MOE_SELF_CHECK=off"));
  EXPECT_EQ(runs_, 1);

  KeptChecks always(process());
  for (int layer = 0; layer < 3; ++layer) {
    const auto choice = must(
        chooser(always, SelfCheckMode::kAlways).choose_checked(config_, device_, "auto"));
    EXPECT_EQ(choice->backend, &kUntried);
    EXPECT_STREQ(choice->check->state(), "passed");
  }
  EXPECT_EQ(runs_, 2);
}

TEST_F(KeptChecksTest, ATriedBackendIsCheckedOnRequestOnly) {
  const CheckScope scope = CheckScope::of(kTried, config_);
  const auto choose = [&](KeptChecks& checks, SelfCheckMode mode) {
    return must(BackendChooser(kTriedFirst, checks, mode).choose_checked(config_, device_, "auto"));
  };
  KeptChecks checks(process(failed()));
  const auto untouched = choose(checks, SelfCheckMode::kAuto);
  EXPECT_EQ(untouched->backend, &kTried);
  EXPECT_EQ(untouched->check, std::nullopt);
  EXPECT_EQ(runs_, 0);
  EXPECT_EQ(choose(checks, SelfCheckMode::kAlways)->backend, &kReferenceBackend);
  EXPECT_EQ(runs_, 1);
  // The failure counts once it is known.
  KeptChecks next(process());
  EXPECT_EQ(choose(next, SelfCheckMode::kAuto)->backend, &kReferenceBackend);
  EXPECT_EQ(choose(next, SelfCheckMode::kOff)->backend, &kTried);
  EXPECT_EQ(runs_, 1);
}

TEST_F(KeptChecksTest, AnotherDriverLibraryOrDeviceIsCheckedAgain) {
  KeptChecks(process()).check(scope_, device_, Reuse::kKept);
  EXPECT_EQ(runs_, 1);
  KeptChecks::Settings driver = process(), library = process();
  driver.driver = "590.1";
  library.library = "0.1.1";
  DeviceFacts other = device_;
  other.uuid = "00112233445566778899aabbccddeeff";
  for (const KeptChecks::Settings& changed : {driver, library}) {
    KeptChecks checks(changed);
    EXPECT_EQ(checks.kept(scope_, device_), std::nullopt);
    checks.check(scope_, device_, Reuse::kKept);
  }
  KeptChecks checks(process());
  EXPECT_EQ(checks.kept(scope_, other), std::nullopt);
  checks.check(scope_, other, Reuse::kKept);
  EXPECT_EQ(runs_, 4);
  EXPECT_FALSE(KeptChecks(process()).kept(scope_, device_)->failed());
}

ATTACK_TEST_F(kInterrupts, KeptChecksTest, ACheckThatWasKilledIsAFailureUntilTheNextRequest) {
  KeptChecks::Settings settings = process();
  settings.run = [](const CheckScope&, const DeviceFacts&, milliseconds) -> CheckOutcome {
    raise(SIGKILL);
    return {};
  };
  EXPECT_EQ(in_forked_child([&] {
              KeptChecks(settings).check(scope_, device_, Reuse::kKept);
              return 0;
            }),
            -1);
  constexpr const char* kNeverEnded =
      "failed: a check began and never ended: it may have hung the device";
  KeptChecks second(process());
  EXPECT_EQ(second.kept(scope_, device_)->text(), kNeverEnded);
  EXPECT_EQ(second.check(scope_, device_, Reuse::kKept).text(), kNeverEnded);
  EXPECT_EQ(KeptChecks(process()).check(scope_, device_, Reuse::kKept).text(), kNeverEnded);
  EXPECT_EQ(runs_, 0);
  EXPECT_FALSE(second.check(scope_, device_, Reuse::kNone).failed());  // doctor --self-check
  EXPECT_EQ(runs_, 1);
  EXPECT_FALSE(KeptChecks(process()).check(scope_, device_, Reuse::kKept).failed());
  EXPECT_EQ(runs_, 1);
}

// The child checks until the parent has seen its mark; `ran` is written once by each check.
ATTACK_TEST_F(kForks, KeptChecksTest, ProcessesAtOnceRunOneCheck) {
  const std::string ran = dir_.file("ran"), go_on = dir_.file("go_on");
  const auto slow = [&](const CheckScope&, const DeviceFacts&, milliseconds) {
    std::ofstream(ran, std::ios::app) << "x";
    while (!fs::exists(go_on)) std::this_thread::sleep_for(milliseconds(5));
    return passed();
  };
  KeptChecks::Settings settings = process();
  settings.run = slow;
  std::array<pid_t, 3> children{};
  for (pid_t& child : children) {
    attacked();
    child = fork();
    if (child != 0) continue;
    alarm(30);  // its signal ends a child that hangs
    _exit(KeptChecks(settings).check(scope_, device_, Reuse::kKept).failed() ? 2 : 0);
  }
  while (!fs::exists(ran)) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt);  // it is not dead
  KeptChecks::Settings impatient = process();
  impatient.limit = impatient.time_to_write = milliseconds(20);
  const KeptCheck waited = KeptChecks(impatient).check(scope_, device_, Reuse::kKept);
  EXPECT_EQ(waited.outcome.verdict, Verdict::kTimedOut);
  EXPECT_THAT(waited.text(), HasSubstr("another process has been checking"));
  std::this_thread::sleep_for(milliseconds(100));  // the other children wait by now
  std::ofstream(go_on) << "";
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(read_file(ran), "x");
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_)->outcome.kernels, 7);
  EXPECT_EQ(runs_, 0);
}

ATTACK_TEST_F(kHostileFiles, KeptChecksTest, DamagedAndForeignFilesAreIgnoredAndRewritten) {
  KeptChecks(process(failed())).check(scope_, device_, Reuse::kKept);
  ASSERT_EQ(files(".json").size(), 1u);
  const fs::path file = files(".json")[0];
  const std::string whole = read_file(file.string());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    EXPECT_NE(text.find(from), text.npos) << from;
    return text.replace(text.find(from), from.size(), to);
  };
  int runs = runs_;
  const auto is_ignored = [&](const std::string& what) {
    attacked();
    EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt) << what;
    EXPECT_FALSE(KeptChecks(process()).check(scope_, device_, Reuse::kKept).failed()) << what;
    EXPECT_EQ(runs_, ++runs) << what;
    const auto rewritten = KeptChecks(process()).kept(scope_, device_);
    ASSERT_TRUE(rewritten) << what;
    EXPECT_FALSE(rewritten->failed()) << what;
  };
  for (const std::string& text :
       {std::string(), std::string("x"), std::string(300000, ' '), whole.substr(0, whole.size() / 2),
        with("\"version\": 1", "\"version\": 2"), with("580.65.06", "580.65.07"),
        with("\"failed\"", "\"splendid\""), with("\"checks\": {", "\"checks\": [], \"more\": {"),
        std::string("[1]")}) {
    std::ofstream(file) << text;
    is_ignored(text.substr(0, 40));
  }
  std::ofstream(file) << whole;
  ASSERT_EQ(chmod(file.c_str(), 0666), 0);
  is_ignored("others may write it");
  fs::rename(file, dir_.file("elsewhere"));
  std::ofstream(dir_.file("elsewhere")) << whole;
  fs::create_symlink(dir_.file("elsewhere"), file);
  is_ignored("a link");
}

TEST_F(KeptChecksTest, WithoutAFolderResultsAreKeptInTheProcess) {
  std::ofstream(dir_.file("file")) << "";
  fs::create_directory(dir_.file("open"));
  ASSERT_EQ(chmod(dir_.file("open").c_str(), 0777), 0);
  fs::create_directory(dir_.file("closed"));
  ASSERT_EQ(chmod(dir_.file("closed").c_str(), 0500), 0);
  fs::permissions(dir_.path(), fs::perms(0755));
  for (const std::string& folder :
       {std::string(), dir_.file("file") + "/nvfp4-moe", dir_.file("open"), dir_.file("closed")}) {
    const AsNobody nobody;
    folder_ = folder;
    runs_ = 0;
    KeptChecks checks(process(failed()));
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed()) << folder;
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed()) << folder;
    EXPECT_TRUE(checks.kept(scope_, device_)->failed()) << folder;
    EXPECT_EQ(runs_, 1) << folder;
    EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt) << folder;
  }
}

// A file in the way of the results: the mark must not stay, since it would count as a failure.
TEST_F(KeptChecksTest, AnExceptionOrAFullDiskLeavesNoMark) {
  KeptChecks::Settings settings = process();
  settings.run = [](const CheckScope&, const DeviceFacts&, milliseconds) -> CheckOutcome {
    throw std::bad_alloc();
  };
  EXPECT_THROW(KeptChecks(settings).check(scope_, device_, Reuse::kKept), std::bad_alloc);
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt);
  EXPECT_FALSE(KeptChecks(process()).check(scope_, device_, Reuse::kKept).failed());
  const fs::path file = files(".json")[0];
  fs::remove(file);
  settings.run = [&](const CheckScope&, const DeviceFacts&, milliseconds) {
    fs::remove(file);
    fs::create_directory(file);
    return passed();
  };
  KeptChecks checks(settings);
  EXPECT_FALSE(checks.check(scope_, device_, Reuse::kKept).failed());
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt);
  EXPECT_FALSE(KeptChecks(process()).check(scope_, device_, Reuse::kKept).failed());
}

TEST(KeptChecks, TheUsersCacheFolderIsUsed) {
  const char* const home = getenv("HOME");
  const std::string old_home = home == nullptr ? "" : home;
  {
    const ScopedEnv cache("XDG_CACHE_HOME", "/var/cache/me");
    EXPECT_EQ(cache_home(), "/var/cache/me");
  }
  {
    const ScopedEnv cache("XDG_CACHE_HOME", "relative"), new_home("HOME", "/home/me");
    EXPECT_EQ(cache_home(), "/home/me/.cache");
  }
  unsetenv("HOME");
  EXPECT_EQ(cache_home(), "");
  if (home != nullptr) setenv("HOME", old_home.c_str(), 1);
}

TEST(KeptChecks, WithoutAGpuThereIsNothingToCheck) {
  int reports = 0;
  const Status status = run_self_checks("cpu", [&](const DeviceCheck&) { ++reports; });
  if (device_facts("cuda:0").ok()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_OK(status);
  EXPECT_EQ(reports, 0);
  EXPECT_EQ(run_self_checks("cuda:0", {}).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nvfp4_moe::internal
