#include "convert/unfinished_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "convert/checkpoint_copy.h"
#include "io/files.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal {
namespace {

constexpr const char* kPlanFile = "quantize.plan.json";
constexpr size_t kMostPlanBytes = size_t{64} << 20;

// Whether OUT has only leftovers of a run that was stopped before its plan was complete: temporary
// files, an empty plan.
Result<bool> holds_nothing(const std::string& out) {
  NVFP4_MOE_ASSIGN(const std::vector<std::string> names, list_directory(out));
  for (const std::string& name : names) {
    const bool temporary =
        name == partial_path(kPlanFile) || name == std::string(kPlanFile) + ".partial";
    struct stat facts {};
    if (::lstat((std::filesystem::path(out) / name).c_str(), &facts) != 0 ||
        !S_ISREG(facts.st_mode))
      return false;
    if (!temporary && !(name == kPlanFile && facts.st_size == 0)) return false;
  }
  return true;
}

// Removes the temporary files of this version, and of the one before it.
Status remove_temporaries(const std::string& plan_path) {
  NVFP4_MOE_TRY(remove_file(partial_path(plan_path)));
  return remove_file(plan_path + ".partial");
}

Status refuse_contents(const std::string& out) {
  return invalid_argument(printable(out, 4096) +
                          ": expected a new or empty directory, or an unfinished quantize; choose "
                          "another name, or remove it");
}

}  // namespace

Result<UnfinishedOutput::Lock> UnfinishedOutput::Lock::take(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno_status(folder, "cannot open", errno);
  Lock lock(fd);
  // A file system without locks cannot report other users.
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    return Status(Code::kBusy, printable(folder, 4096) + ": another quantize is writing to it");
  return lock;
}

UnfinishedOutput::Lock::~Lock() {
  if (fd_ >= 0) ::close(fd_);
}

Status UnfinishedOutput::check(const std::string& in, const std::string& out) {
  NVFP4_MOE_TRY(check_apart(in, out));
  NVFP4_MOE_ASSIGN(const bool there, has_entry(out));
  if (!there) return {};
  std::error_code error;  // anything that is not a folder, or cannot be read, is refused
  if (!std::filesystem::is_directory(out, error)) return refuse_contents(out);
  NVFP4_MOE_ASSIGN(const bool nothing, holds_nothing(out));
  if (nothing) return {};
  NVFP4_MOE_ASSIGN(const bool planned,
                   has_entry((std::filesystem::path(out) / kPlanFile).string()));
  return planned ? Status() : refuse_contents(out);
}

Result<UnfinishedOutput> UnfinishedOutput::claim(const std::string& out, QuantizePlan plan) {
  NVFP4_MOE_TRY(make_directories(out));
  NVFP4_MOE_ASSIGN(Lock lock, Lock::take(out));
  UnfinishedOutput claimed(out, std::move(lock));
  const std::string path = claimed.plan_path();
  NVFP4_MOE_ASSIGN(const bool nothing, holds_nothing(out));
  if (nothing) {
    NVFP4_MOE_TRY(remove_temporaries(path));
    NVFP4_MOE_TRY(write_text_file(path, to_json(plan)));
    claimed.plan_ = std::move(plan);
    return claimed;
  }
  NVFP4_MOE_ASSIGN(const bool planned, has_entry(path));
  if (!planned) return refuse_contents(out);
  NVFP4_MOE_ASSIGN(const std::string text, read_text_file(path, kMostPlanBytes));
  auto found = parse_quantize_plan(text);
  if (!found.ok())
    return bad_input(fmt::format("{}: not a plan of quantize ({}); remove {} to start anew",
                                 printable(path, 4096), found.status().message(),
                                 printable(out, 4096)));
  if (const Status same = check_same_work(plan, *found); !same.ok())
    return Status(same.code(),
                  fmt::format("{}: an unfinished quantize with {}; remove it to start anew",
                              printable(out, 4096), same.message()));
  claimed.plan_ = std::move(*found);
  return claimed;
}

std::string UnfinishedOutput::plan_path() const {
  return (std::filesystem::path(out_) / kPlanFile).string();
}

ShardRecords UnfinishedOutput::records() {
  ShardRecords records;
  records.finished = plan_.shards;
  records.record = [this](const ShardRecord& shard) {
    plan_.shards[shard.name] = shard;
    return write_text_file(plan_path(), to_json(plan_));
  };
  return records;
}

const ExpertQuality* UnfinishedOutput::find(ExpertId id) const {
  const auto found = plan_.experts.find(id);
  return found == plan_.experts.end() ? nullptr : &found->second;
}

Status UnfinishedOutput::save_exceptions() const {
  return write_text_file(plan_path(), to_json(plan_));
}

Status UnfinishedOutput::close() {
  // Everything must have its name before the plan is removed, including files that an earlier run
  // renamed but did not sync.
  NVFP4_MOE_TRY(remove_temporaries(plan_path()));
  NVFP4_MOE_TRY(sync_directory(out_));
  NVFP4_MOE_TRY(remove_file(plan_path()));
  return sync_directory(out_);
}

}  // namespace nvfp4_moe::internal
