#include "moe/kept_checks.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <thread>

#include "io/content_hash.h"
#include "io/json_strict.h"
#include "moe/cache_folder.h"
#include "moe/env.h"
#include "moe/readiness.h"

namespace nvfp4_moe::internal {
namespace {

using Verdict = CheckOutcome::Verdict;

constexpr mode_t kCheckFolderMode = 0700;
constexpr int64_t kFileVersion = 1;
constexpr size_t kMostFileBytes = size_t{256} << 10;
constexpr const char* kChecking = "checking";  // the mark, in place of a verdict

CheckOutcome outcome_without_check(Verdict verdict, const std::string& difference) {
  CheckOutcome outcome;
  outcome.verdict = verdict;
  outcome.difference = difference;
  return outcome;
}
CheckOutcome never_ended() {
  return outcome_without_check(Verdict::kFailed,
                               "a check began and never ended: it may have hung the device");
}

std::string device_text(const DeviceFacts& device) {
  return device.name + ", compute capability " + std::to_string(device.compute_capability / 10) +
         "." + std::to_string(device.compute_capability % 10) + ", " +
         (device.uuid.empty()
              ? std::string(to_string(device.kind)) + ":" + std::to_string(device.index) + " of " +
                    std::to_string(device.memory_bytes) + " bytes"
              : device.uuid);
}

// One scope in a file: a result, or the mark of a check in progress.
struct CheckRecord {
  bool checking = false;
  CheckOutcome outcome;
};
using CheckRecords = std::map<std::string, CheckRecord>;

class CheckFileDescriptor {
 public:
  explicit CheckFileDescriptor(int file) : file_(file) {}
  CheckFileDescriptor(const CheckFileDescriptor&) = delete;
  CheckFileDescriptor& operator=(const CheckFileDescriptor&) = delete;
  ~CheckFileDescriptor() {
    if (file_ >= 0) ::close(file_);
  }
  int get() const { return file_; }
  // Whether it is an open regular file that only this user or root can have written.
  bool trusted(const std::string& path) const {
    struct stat facts {};
    return file_ >= 0 && ::fstat(file_, &facts) == 0 && S_ISREG(facts.st_mode) &&
           check_cache_owner(path, facts).ok();
  }

 private:
  const int file_;
};

// The file of one device, driver and library.
class CheckFile {
 public:
  CheckFile(const CacheFolder& folder, const DeviceFacts& device,
            const KeptChecks::Settings& settings)
      : folder_(folder),
        identity_{{"version", kFileVersion},
                  {"device", device_text(device)},
                  {"driver", settings.driver},
                  {"library", settings.library}} {
    const std::string text = identity_.dump();
    name_ = "self-check-" + to_string(content_hash(text.data(), text.size())).substr(0, 16);
    file_name_ = name_ + ".json";
  }

  std::string lock_name() const { return name_ + ".lock"; }

  // Empty for a file that is missing, damaged, or not this user's.
  CheckRecords read() const {
    const CheckFileDescriptor file(::openat(folder_.descriptor(), file_name_.c_str(),
                                            O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!file.trusted(folder_.file(file_name_))) return {};
    std::string text(kMostFileBytes + 1, '\0');
    size_t size = 0;
    while (size < text.size()) {
      const ssize_t count = ::read(file.get(), text.data() + size, text.size() - size);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return {};
      if (count == 0) break;
      size += static_cast<size_t>(count);
    }
    text.resize(size);
    JsonLimits limits;
    limits.max_bytes = kMostFileBytes;
    const Result<Json> json = parse_json_strict(text, limits);
    if (!json.ok()) return {};
    for (const auto& [key, value] : identity_.items())
      if (!((*json)[key] == value)) return {};
    CheckRecords records;
    for (const auto& [scope, check] : (*json)["checks"].items()) {
      const std::string& word = check["verdict"].text();
      const Result<Verdict> verdict = parse<Verdict>(word);
      CheckRecord record;
      record.checking = word == kChecking;
      if (!record.checking && !verdict.ok()) continue;
      if (verdict.ok()) record.outcome.verdict = *verdict;
      record.outcome.kernel = check["kernel"].text();
      record.outcome.difference = check["difference"].text();
      record.outcome.step_variants = check["step_variants"].get<int>();
      record.outcome.milliseconds = check["milliseconds"].get<double>();
      records[scope] = record;
    }
    return records;
  }

  bool write(const CheckRecords& records) const {
    Json checks = Json::object();
    for (const auto& [scope, record] : records) {
      const CheckOutcome& outcome = record.outcome;
      checks[scope] = {{"verdict", record.checking ? kChecking : name_of(outcome.verdict)},
                       {"kernel", outcome.kernel},
                       {"difference", outcome.difference},
                       {"step_variants", outcome.step_variants},
                       {"milliseconds", outcome.milliseconds}};
    }
    Json json = identity_;
    json["checks"] = checks;
    const std::string text = json.dump(1) + "\n";
    Result<CachePart> part = CachePart::create(folder_, file_name_, 0600);
    if (!part.ok()) return false;
    for (size_t at = 0; at < text.size();) {
      const ssize_t count = ::write(part->descriptor(), text.data() + at, text.size() - at);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      at += static_cast<size_t>(count);
    }
    return part->rename_to(file_name_).ok();
  }

  // Removes the file, with all its results, if it cannot be written: no mark may stay.
  void write_or_remove(const CheckRecords& records) const noexcept {
    bool written = false;
    try {
      written = write(records);
    } catch (...) {  // out of memory
    }
    if (!written) ::unlinkat(folder_.descriptor(), file_name_.c_str(), 0);
  }
  // Removes part files of processes that were killed while they wrote this file.
  void sweep_parts() const { sweep_cache_parts(folder_, file_name_ + "."); }

 private:
  const CacheFolder& folder_;
  const Json identity_;
  std::string name_, file_name_;
};

// The lock of a file. It is next to the file, which a writer replaces.
class CheckLock {
 public:
  CheckLock(const CacheFolder& folder, const std::string& name)
      : file_(::openat(folder.descriptor(), name.c_str(),
                       O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600)),
        usable_(file_.trusted(folder.file(name))) {}
  // Unlocks, because a child that was forked meanwhile has the same open file.
  ~CheckLock() {
    if (held_) ::flock(file_.get(), LOCK_UN);
  }

  enum class Taken { kYes, kNo, kUnusable };  // kUnusable: this file system has no locks
  Taken take(std::chrono::milliseconds timeout) {
    if (!usable_) return Taken::kUnusable;
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return Taken::kUnusable;
      if (std::chrono::steady_clock::now() >= end) return Taken::kNo;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    held_ = true;
    return Taken::kYes;
  }

 private:
  const CheckFileDescriptor file_;
  const bool usable_;
  bool held_ = false;
};

}  // namespace

std::string KeptCheck::text() const {
  std::string what = outcome.kernel.empty() ? "" : outcome.kernel + ": ";
  what += outcome.difference;
  if (outcome.of_plain_kernel())
    what += "; the plain kernels of cuda failed: do not trust results of this device";
  switch (outcome.verdict) {
    case Verdict::kPassed:
      return "passed (" + std::to_string(outcome.step_variants) + " step variants)";
    case Verdict::kFailed: return "failed: " + what;
    case Verdict::kTimedOut: return "timed out: " + what;
    case Verdict::kError: break;
  }
  return "ended with an error: " + what;
}

KeptChecks& KeptChecks::of_process() {
  static KeptChecks& checks = *new KeptChecks([] {  // outlives threads that open layers
    Settings settings;
    const std::string cache = user_cache_folder();
    settings.folder = cache.empty() ? "" : cache + "/nvfp4-moe";
    settings.driver = driver_text();
    settings.library = library_text();
    return settings;
  }());
  return checks;
}

Status KeptChecks::can_keep() const {
  if (settings_.folder.empty())
    return io_error("no cache folder: set XDG_CACHE_HOME to an absolute path");
  NVFP4_MOE_ASSIGN(const CacheFolder folder, CacheFolder::open(settings_.folder, kCheckFolderMode));
  if (::faccessat(folder.descriptor(), ".", W_OK | X_OK, AT_EACCESS) != 0)
    return errno_status(settings_.folder, "cannot write", errno);
  return {};
}

std::map<std::string, KeptCheck> KeptChecks::kept(const DeviceFacts& device) {
  std::map<std::string, KeptCheck> results;
  struct stat facts {};
  if (!settings_.folder.empty() && ::stat(settings_.folder.c_str(), &facts) == 0) {
    const Result<CacheFolder> folder = CacheFolder::open(settings_.folder, kCheckFolderMode);
    if (folder.ok()) {
      const CheckFile file(*folder, device, settings_);
      CheckRecords records = file.read();
      const auto is_checking = [](const auto& record) { return record.second.checking; };
      if (std::any_of(records.begin(), records.end(), is_checking)) {
        CheckLock lock(*folder, file.lock_name());
        // The check may have ended between reading its mark and taking the lock.
        const bool free = lock.take(std::chrono::milliseconds(0)) == CheckLock::Taken::kYes;
        if (free) records = file.read();
        for (auto& [scope, record] : records)
          if (free && record.checking) record = {false, never_ended()};
      }
      for (const auto& [scope, record] : records)
        if (!record.checking) results[scope] = {record.outcome};
    }
  }
  const std::string id = device_text(device);
  const std::lock_guard lock(mutex_);
  for (const auto& [key, check] : used_)
    if (key.first == id) results[key.second] = check;
  return results;
}

std::optional<KeptCheck> KeptChecks::kept(const CheckScope& scope, const DeviceFacts& device) {
  const std::map<std::string, KeptCheck> results = kept(device);
  const auto found = results.find(scope.name());
  return found == results.end() ? std::nullopt : std::optional(found->second);
}

KeptCheck KeptChecks::check(const CheckScope& scope, const DeviceFacts& device, Reuse reuse) {
  const Key key{device_text(device), scope.name()};
  const std::lock_guard one_check(checking_);
  {
    const std::lock_guard lock(mutex_);
    const auto used = used_.find(key);
    if (used != used_.end() &&
        (reuse == Reuse::kKept || (reuse == Reuse::kOfThisProcess && used->second.ran_here)))
      return used->second;
  }
  const KeptCheck result = check_and_write(scope, device, reuse);
  const std::lock_guard lock(mutex_);
  return used_[key] = result;
}

KeptCheck KeptChecks::check_and_write(const CheckScope& scope, const DeviceFacts& device,
                                      Reuse reuse) {
  const auto run = [&] { return KeptCheck{settings_.run(scope, device, settings_.limit), true}; };
  if (settings_.folder.empty()) return run();
  const Result<CacheFolder> folder = CacheFolder::open(settings_.folder, kCheckFolderMode);
  if (!folder.ok()) return run();
  const CheckFile file(*folder, device, settings_);
  // A result needs no lock, because writers replace the whole file. The lock may be held for other
  // scopes all the time, and cannot be taken in a folder that is read-only.
  const auto kept_result = [&]() -> std::optional<KeptCheck> {
    if (reuse != Reuse::kKept) return std::nullopt;
    const CheckRecords records = file.read();
    const auto found = records.find(scope.name());
    if (found == records.end() || found->second.checking) return std::nullopt;
    return KeptCheck{found->second.outcome};
  };
  if (const auto result = kept_result()) return *result;
  CheckLock lock(*folder, file.lock_name());
  const CheckLock::Taken taken = lock.take(settings_.limit + settings_.time_to_write);
  if (taken != CheckLock::Taken::kYes) {
    if (const auto result = kept_result()) return *result;
    if (taken == CheckLock::Taken::kUnusable) return run();
    // No kernel of this scope has hung.
    return {outcome_without_check(Verdict::kError,
                                  "another process has been checking this device for longer than "
                                  "a check may take")};
  }
  file.sweep_parts();
  CheckRecords records = file.read();
  const auto kept = records.find(scope.name());
  if (reuse == Reuse::kKept && kept != records.end()) {
    if (kept->second.checking) {
      kept->second = {false, never_ended()};
      file.write(records);
    }
    return {kept->second.outcome};
  }
  const CheckRecords before = records;
  CheckRecord& record = records[scope.name()];
  record = {true, {}};
  if (!file.write(records)) return run();  // a full disk
  KeptCheck result;
  try {
    result = run();
  } catch (...) {  // out of memory: nothing is known about the device
    file.write_or_remove(before);
    throw;
  }
  record = {false, result.outcome};
  // No memory, no thread, or no first kernel within the limit is not the kernels' fault, and leaves
  // what an earlier check has found.
  const bool says_nothing = result.failed() && result.outcome.kernel.empty();
  file.write_or_remove(says_nothing ? before : records);
  return result;
}

bool KeptChecks::is_first_warning(const CheckScope& scope, const DeviceFacts& device) {
  const std::lock_guard lock(mutex_);
  return warned_.emplace(device_text(device), scope.name()).second;
}

}  // namespace nvfp4_moe::internal
