#include "moe/cache_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <utility>

#include "core/boot_id.h"
#include "io/content_hash.h"
#include "io/files.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

bool is_ours(const struct stat& facts) { return facts.st_uid == ::geteuid() || facts.st_uid == 0; }

Status check_folder(const std::string& shown, const struct stat& facts) {
  if (!is_ours(facts))
    return bad_input(fmt::format(
        "{}: expected a folder of user {} or of root, got one of user {}, who may put other "
        "weights there: name a folder of your own",
        shown, ::geteuid(), facts.st_uid));
  if ((facts.st_mode & kOthersWrite) != 0 && (facts.st_mode & S_ISVTX) == 0)
    return bad_input(fmt::format(
        "{}: expected a folder that its owner only may write to, or one with the sticky bit, "
        "got mode {:o}: chmod go-w it",
        shown, facts.st_mode & 07777));
  return {};
}

}  // namespace

Result<CacheFolder> CacheFolder::open(const std::string& path, mode_t mode) {
  NVFP4_MOE_TRY(make_directories(path, mode));
  CacheFolder folder(path, -1);  // the copy of the path may throw, and nobody would close the file
  folder.folder_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder.folder_ < 0) return errno_status(path, "cannot open", errno);
  struct stat facts {};
  if (::fstat(folder.folder_, &facts) != 0) return errno_status(path, "cannot stat", errno);
  NVFP4_MOE_TRY(check_folder(printable(path, 4096), facts));
  return folder;
}

CacheFolder::CacheFolder(CacheFolder&& other) noexcept
    : path_(std::move(other.path_)), folder_(std::exchange(other.folder_, -1)) {}

CacheFolder::~CacheFolder() {
  if (folder_ >= 0) ::close(folder_);
}

std::string CacheFolder::file(const std::string& name) const {
  return (fs::path(path_) / name).string();
}

Status check_cache_owner(const std::string& shown, const struct stat& facts) {
  if ((facts.st_mode & kOthersWrite) != 0)
    return bad_input(fmt::format("{}: expected a file that its owner only may write, got mode {:o}",
                                 shown, facts.st_mode & 0777));
  if (is_ours(facts)) return {};
  return bad_input(fmt::format("{}: expected a file of user {} or of root, got one of user {}",
                               shown, ::geteuid(), facts.st_uid));
}

bool readable_by_everybody(const std::vector<std::unique_ptr<TensorFile>>& files) {
  for (const auto& file : files) {
    struct stat facts {};
    if (::fstat(file->descriptor(), &facts) != 0 || (facts.st_mode & S_IROTH) == 0) return false;
    std::error_code error;
    // resolve links, which have no permissions of their own
    fs::path folder = fs::canonical(file->path(), error);
    if (error) return false;
    while (folder.has_relative_path()) {
      folder = folder.parent_path();
      if (::stat(folder.c_str(), &facts) != 0 || (facts.st_mode & S_IXOTH) == 0) return false;
    }
  }
  return true;
}

namespace {

constexpr const char* kPartEnd = ".part";
constexpr time_t kStaleSeconds = 3600;

// 16 digits that identify this boot of this machine, within which the kernel tracks locks;
// "unknown" if the system has no boot id.
const std::string& boot_name() {
  static const std::string name = [] {
    const Result<std::string> id = boot_id();
    return id.ok() ? to_string(content_hash(id->data(), id->size())).substr(0, 16)
                   : std::string("unknown");
  }();
  return name;
}

bool is_of_this_boot(const std::string& name) {
  return boot_name() != "unknown" && name.find("." + boot_name() + "-") != std::string::npos;
}

// Removes the file unless a writer may still hold it.
bool remove_if_dead(const CacheFolder& folder, const std::string& name) {
  struct stat named {};
  if (::fstatat(folder.descriptor(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) != 0 ||
      !S_ISREG(named.st_mode))
    return false;
  const int file =
      ::openat(folder.descriptor(), name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return false;
  struct stat held {};
  const bool dead =
      ::fstat(file, &held) == 0 && S_ISREG(held.st_mode) && held.st_dev == named.st_dev &&
      held.st_ino == named.st_ino && ::flock(file, LOCK_EX | LOCK_NB) == 0 &&
      (is_of_this_boot(name) || held.st_mtim.tv_sec + kStaleSeconds < std::time(nullptr));
  // Unlink under the lock, so that a new writer sees that the file is gone.
  const bool removed = dead && ::unlinkat(folder.descriptor(), name.c_str(), 0) == 0;
  ::close(file);
  return removed;
}

}  // namespace

Result<CachePart> CachePart::create(const CacheFolder& folder, const std::string& name,
                                    mode_t mode) {
  static std::atomic<uint64_t> counter{0};
  CachePart part(folder);
  for (int attempt = 0; attempt < 100; ++attempt) {
    part.name_ = name + "." + boot_name() + "-" + std::to_string(::getpid()) + "-" +
                 std::to_string(counter.fetch_add(1)) + kPartEnd;
    const int file = ::openat(folder.descriptor(), part.name_.c_str(),
                              O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
    if (file < 0 && errno == EEXIST)
      continue;  // of a process in another pid namespace, or of one that is gone
    if (file < 0) return errno_status(part.path(), "cannot create", errno);
    // A sweep may run between the two calls; then it holds the file or has already removed it.
    struct stat facts {};
    const bool locked = ::flock(file, LOCK_EX | LOCK_NB) == 0 ||
                        errno != EWOULDBLOCK;  // some systems have no locks
    if (locked && ::fstat(file, &facts) == 0 && facts.st_nlink > 0) {
      part.file_ = file;
      return part;
    }
    ::close(file);
  }
  return io_error(printable(folder.file(name), 4096) +
                  ": expected a free name for a part file, got none in 100 attempts");
}

CachePart::CachePart(CachePart&& other) noexcept
    : folder_(other.folder_),
      name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)) {}

CachePart::~CachePart() {
  if (file_ < 0) return;
  ::unlinkat(folder_->descriptor(), name_.c_str(), 0);
  ::close(file_);
}

Status CachePart::rename_to(const std::string& name) {
  // A link with the cache's own name is replaced, never followed. A device, FIFO or folder belongs
  // to someone else.
  const int folder = folder_->descriptor();
  struct stat facts {};
  if (::fstatat(folder, name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) == 0 &&
      !S_ISREG(facts.st_mode) && !S_ISLNK(facts.st_mode))
    return bad_input(printable(folder_->file(name), 4096) +
                     ": expected a regular file to replace or nothing, got something else");
  if (::fsync(file_) != 0) return errno_status(path(), "cannot sync", errno);
  if (::renameat(folder, name_.c_str(), folder, name.c_str()) != 0)
    return errno_status(path(), "cannot rename into place", errno);
  if (::close(std::exchange(file_, -1)) != 0 && errno != EINTR)
    return errno_status(folder_->file(name), "cannot close", errno);
  return sync_directory(folder, folder_->path());
}

int sweep_cache_parts(const CacheFolder& folder, const std::string& end) {
  int removed = 0;
  // List by path. If the path refers to another folder by now, a name from there either does not
  // exist in the open folder or is a part file there too.
  const auto names = list_directory(folder.path());
  if (!names.ok()) return 0;
  for (const std::string& name : *names)
    if (name.ends_with(kPartEnd) && name.find(end) != std::string::npos &&
        remove_if_dead(folder, name))
      ++removed;
  return removed;
}

}  // namespace nvfp4_moe::internal
