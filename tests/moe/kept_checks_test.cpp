// Results of self-checks: kept and reused, a check that was killed, processes at once, damaged
// files, folders that cannot be used.
#include "moe/kept_checks.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <csignal>
#include <fstream>
#include <thread>

#include "moe/cache_folder.h"
#include "moe/readiness.h"
#include "moe/self_checks.h"
#include "support/as_nobody.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
namespace fs = std::filesystem;
using std::chrono::milliseconds;
using Reuse = KeptChecks::Reuse;
using Verdict = CheckOutcome::Verdict;

TEST_F(KeptChecksTest, PassedIsKeptAndNotRunAgain) {
  KeptChecks first(process());
  EXPECT_OK(first.can_keep());
  EXPECT_EQ(first.kept(scope_, device_), std::nullopt);
  EXPECT_TRUE(first.check(scope_, device_, Reuse::kKept).ran_here);
  first.check(scope_, device_, Reuse::kKept);
  EXPECT_EQ(runs_, 1);
  KeptChecks second(process(failed_check()));
  for (const auto& result :
       {second.kept(scope_, device_), std::optional(second.check(scope_, device_, Reuse::kKept))}) {
    ASSERT_TRUE(result);
    EXPECT_FALSE(result->failed());
    EXPECT_FALSE(result->ran_here);
    EXPECT_EQ(result->outcome.step_variants, 7);
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

TEST_F(KeptChecksTest, AnErrorOrTimeOutBeforeTheFirstKernelIsNotWritten) {
  for (const Verdict verdict : {Verdict::kError, Verdict::kTimedOut}) {
    fs::remove_all(folder_);
    runs_ = 0;
    CheckOutcome before_kernels = failed_check(verdict);
    before_kernels.kernel = "";
    KeptChecks checks(process(before_kernels));
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed());
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed());
    EXPECT_EQ(runs_, 1);
    EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt) << name_of(verdict);
    // It leaves what an earlier check has found.
    KeptChecks(process(failed_check(verdict))).check(scope_, device_, Reuse::kKept);
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kNone).failed());
    EXPECT_EQ(runs_, 3);
    const auto kept = KeptChecks(process()).kept(scope_, device_);
    ASSERT_TRUE(kept);
    EXPECT_EQ(kept->outcome.kernel, failed_check(verdict).kernel);
  }
}

TEST_F(KeptChecksTest, AFailureOfThePlainKernelsIsAWarningAboutTheDevice) {
  const auto warning = [&](const CheckOutcome& outcome) {
    return check_warning({scope_, false, KeptCheck{outcome, true}}, kReferenceBackend, device_);
  };
  constexpr const char* kWords =
      "; the plain kernels of cuda failed: do not trust results of this device; ";
  for (const Verdict verdict : {Verdict::kFailed, Verdict::kTimedOut, Verdict::kError}) {
    CheckOutcome outcome = failed_check(verdict);
    EXPECT_THAT(warning(outcome), testing::Not(HasSubstr("plain kernels")));
    outcome.kernel = "cuda: " + outcome.kernel;
    EXPECT_THAT(warning(outcome), HasSubstr(kWords));
  }
}

// doctor --self-check takes the lock again and again.
TEST_F(KeptChecksTest, AResultIsUsedWhileAnotherProcessHoldsTheLock) {
  KeptChecks(process()).check(scope_, device_, Reuse::kKept);
  ASSERT_EQ(files(".lock").size(), 1u);
  const int lock = open(files(".lock")[0].c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  KeptChecks::Settings settings = process(failed_check());
  const auto start = std::chrono::steady_clock::now();
  const KeptCheck result = KeptChecks(settings).check(scope_, device_, Reuse::kKept);
  EXPECT_LT(std::chrono::steady_clock::now() - start, settings.limit);
  EXPECT_FALSE(result.failed()) << result.text();
  EXPECT_FALSE(result.ran_here);
  // Also if the result is written during the wait.
  const fs::path file = files(".json")[0], elsewhere = dir_.file("elsewhere");
  fs::rename(file, elsewhere);
  settings.limit = milliseconds(1000), settings.time_to_write = milliseconds(0);
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    fs::rename(elsewhere, file);
  });
  const KeptCheck late = KeptChecks(settings).check(scope_, device_, Reuse::kKept);
  EXPECT_FALSE(late.failed()) << late.text();
  writer.join();
  close(lock);
  EXPECT_EQ(runs_, 1);
}

TEST_F(KeptChecksTest, AFailureInAReadOnlyFolderIsNotRunAgain) {
  KeptChecks(process(failed_check(Verdict::kTimedOut))).check(scope_, device_, Reuse::kKept);
  fs::remove(files(".lock")[0]);
  ASSERT_EQ(chmod(files(".json")[0].c_str(), 0644), 0);
  fs::permissions(dir_.path(), fs::perms(0755));
  fs::permissions(dir_.file("cache"), fs::perms(0755));
  ASSERT_EQ(chmod(folder_.c_str(), 0555), 0);
  {
    const AsNobody nobody;
    KeptChecks checks(process());
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed());
    EXPECT_EQ(runs_, 1);
    EXPECT_THAT(checks.can_keep().message(), HasSubstr("cannot write"));
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
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
  settings.run = [&](const CheckScope&, const DeviceFacts&, milliseconds) -> CheckOutcome {
    const auto folder = must(CacheFolder::open(folder_));
    const auto part = CachePart::create(*folder, files(".json")[0].filename().string(), 0600);
    raise(SIGKILL);
    return {};
  };
  EXPECT_EQ(in_forked_child([&] {
              KeptChecks(settings).check(scope_, device_, Reuse::kKept);
              return 0;
            }),
            -1);
  EXPECT_EQ(files(".part").size(), 1u);
  constexpr const char* kNeverEnded =
      "failed: a check began and never ended: it may have hung the device";
  KeptChecks second(process());
  EXPECT_EQ(second.kept(scope_, device_)->text(), kNeverEnded);
  EXPECT_EQ(second.check(scope_, device_, Reuse::kKept).text(), kNeverEnded);
  EXPECT_EQ(KeptChecks(process()).check(scope_, device_, Reuse::kKept).text(), kNeverEnded);
  EXPECT_EQ(runs_, 0);
  EXPECT_FALSE(second.check(scope_, device_, Reuse::kNone).failed());  // doctor --self-check
  EXPECT_EQ(runs_, 1);
  EXPECT_TRUE(files(".part").empty());
  EXPECT_FALSE(KeptChecks(process()).check(scope_, device_, Reuse::kKept).failed());
  EXPECT_EQ(runs_, 1);
}

// The child checks until the parent has seen its mark; `ran` is written once by each check.
ATTACK_TEST_F(kForks, KeptChecksTest, ProcessesAtOnceRunOneCheck) {
  const std::string ran = dir_.file("ran"), go_on = dir_.file("go_on");
  const auto slow = [&](const CheckScope&, const DeviceFacts&, milliseconds) {
    std::ofstream(ran, std::ios::app) << "x";
    while (!fs::exists(go_on)) std::this_thread::sleep_for(milliseconds(5));
    return passed_check();
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
  EXPECT_EQ(waited.outcome.verdict, Verdict::kError);  // no kernel has hung
  EXPECT_EQ(waited.outcome.kernel, "");
  EXPECT_THAT(waited.text(), HasSubstr("another process has been checking"));
  std::this_thread::sleep_for(milliseconds(100));  // the other children wait by now
  std::ofstream(go_on) << "";
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(read_file(ran), "x");
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_)->outcome.step_variants, 7);
  EXPECT_EQ(runs_, 0);
}

ATTACK_TEST_F(kHostileFiles, KeptChecksTest, DamagedAndForeignFilesAreIgnoredAndRewritten) {
  KeptChecks(process(failed_check())).check(scope_, device_, Reuse::kKept);
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
       {std::string(), std::string("x"), std::string(300000, ' '),
        whole.substr(0, whole.size() / 2), with("\"version\": 1", "\"version\": 2"),
        with("580.65.06", "580.65.07"), with("\"failed\"", "\"splendid\""),
        with("\"checks\": {", "\"checks\": [], \"more\": {"), std::string("[1]")}) {
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
    KeptChecks checks(process(failed_check()));
    EXPECT_FALSE(checks.can_keep().ok()) << folder;
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed()) << folder;
    EXPECT_TRUE(checks.check(scope_, device_, Reuse::kKept).failed()) << folder;
    EXPECT_TRUE(checks.kept(scope_, device_)->failed()) << folder;
    EXPECT_EQ(runs_, 1) << folder;
    EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt) << folder;
  }
}

// The mark must not stay, since it would count as a failure.
TEST_F(KeptChecksTest, AnExceptionOrAFullDiskLeavesNoMark) {
  CheckScope other = scope_;
  other.format = ActivationFormat::kBf16;
  KeptChecks(process(failed_check())).check(other, device_, Reuse::kKept);
  KeptChecks::Settings settings = process();
  settings.run = [](const CheckScope&, const DeviceFacts&, milliseconds) -> CheckOutcome {
    throw std::bad_alloc();
  };
  EXPECT_THROW(KeptChecks(settings).check(scope_, device_, Reuse::kKept), std::bad_alloc);
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt);
  EXPECT_EQ(KeptChecks(process()).kept(device_).size(), 1u);  // the other scope's
  // From the middle of the check on, no file can grow.
  rlimit unlimited{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  const auto old = signal(SIGXFSZ, SIG_IGN);
  settings.run = [&](const CheckScope&, const DeviceFacts&, milliseconds) {
    rlimit none = unlimited;
    none.rlim_cur = 0;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
    return passed_check();
  };
  KeptChecks checks(settings);
  EXPECT_FALSE(checks.check(scope_, device_, Reuse::kKept).failed());
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt);
  // Nor can the mark be written: the check runs without one.
  EXPECT_FALSE(KeptChecks(settings).check(scope_, device_, Reuse::kKept).failed());
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  signal(SIGXFSZ, old);
  EXPECT_EQ(KeptChecks(process()).kept(scope_, device_), std::nullopt);
  EXPECT_FALSE(KeptChecks(process()).check(scope_, device_, Reuse::kKept).failed());
  EXPECT_EQ(runs_, 2);
}

TEST(KeptChecks, TheUsersCacheFolderIsUsed) {
  const char* const folder = getenv("HOME");
  const std::string old = folder == nullptr ? "" : folder;
  {
    const ScopedEnv cache("XDG_CACHE_HOME", "/var/cache/me");
    EXPECT_EQ(user_cache_folder(), "/var/cache/me");
  }
  {
    const ScopedEnv cache("XDG_CACHE_HOME", "relative"), user("HOME", "/users/me");
    EXPECT_EQ(user_cache_folder(), "/users/me/.cache");
  }
  unsetenv("HOME");
  EXPECT_EQ(user_cache_folder(), "");
  if (folder != nullptr) setenv("HOME", old.c_str(), 1);
}

TEST(KeptChecks, WithoutAGpuThereIsNothingToCheck) {
  if (device_facts("cuda:0").ok()) GTEST_SKIP() << "this machine has a GPU";
  int reports = 0;
  EXPECT_OK(run_self_checks("cpu", [&](const DeviceCheck&) { ++reports; }));
  EXPECT_EQ(reports, 0);
  EXPECT_EQ(run_self_checks("cuda:0", {}).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nvfp4_moe::internal
