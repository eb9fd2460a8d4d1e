#include "moe/cache_parts.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <utility>

#include "safetensors/content_hash.h"
#include "safetensors/files.h"
#include "safetensors/output_file.h"

namespace nvfp4_moe {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEntryEnd = ".packed.";
constexpr const char* kPartEnd = ".part";
constexpr time_t kStaleSeconds = 3600;

// 16 digits of this boot of this machine, within which the kernel knows who holds a lock; "unknown" where it has none.
const std::string& boot_name() {
  static const std::string name = [] {
    char id[64];  // 36 characters; a file of /proc has no size, so that it is read rather than measured
    const int file = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t size = file < 0 ? 0 : ::read(file, id, sizeof(id));
    if (file >= 0) ::close(file);
    return size < 1 ? std::string("unknown") : to_string(content_hash(id, static_cast<size_t>(size))).substr(0, 16);
  }();
  return name;
}

bool is_of_this_boot(const std::string& name) {
  return boot_name() != "unknown" && name.find(kEntryEnd + boot_name() + "-") != std::string::npos;
}

bool is_part_name(const std::string& name) {
  return name.ends_with(kPartEnd) && name.find(kEntryEnd) != std::string::npos;
}

// Removes the file at `path` unless a writer may still hold it.
bool remove_if_dead(const std::string& path, const std::string& name) {
  struct stat named {};
  if (::lstat(path.c_str(), &named) != 0 || !S_ISREG(named.st_mode)) return false;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return false;
  struct stat held {};
  const bool dead = ::fstat(file, &held) == 0 && S_ISREG(held.st_mode) && held.st_dev == named.st_dev &&
                    held.st_ino == named.st_ino && ::flock(file, LOCK_EX | LOCK_NB) == 0 &&
                    (is_of_this_boot(name) || held.st_mtim.tv_sec + kStaleSeconds < std::time(nullptr));
  const bool removed = dead && ::unlink(path.c_str()) == 0;  // under the lock: a writer that comes now sees it gone
  ::close(file);
  return removed;
}

}  // namespace

Result<CachePart> CachePart::create(const std::string& name) {
  static std::atomic<uint64_t> counter{0};
  CachePart part;
  for (int attempt = 0; attempt < 100; ++attempt) {
    part.path_ = name + "." + boot_name() + "-" + std::to_string(::getpid()) + "-" +
                 std::to_string(counter.fetch_add(1)) + kPartEnd;
    const int file = ::open(part.path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0 && errno == EEXIST) continue;  // of a process of another namespace, or of one that is gone
    if (file < 0) return errno_status(part.path_, "cannot create", errno);
    // A sweep may come between the two calls; then the file is held by it, or gone already.
    struct stat facts {};
    const bool locked = ::flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;  // some systems have no locks
    if (locked && ::fstat(file, &facts) == 0 && facts.st_nlink > 0) {
      part.file_ = file;
      return part;
    }
    ::close(file);
  }
  return io_error(printable(name, 4096) + ": expected a free name for a part file, got none in 100 attempts");
}

CachePart::CachePart(CachePart&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

CachePart::~CachePart() {
  if (file_ < 0) return;
  ::unlink(path_.c_str());
  ::close(file_);
}

Status CachePart::rename_to(const std::string& name) {
  // A link under the cache's own name is replaced, and never followed; a device, FIFO or folder there is somebody's.
  struct stat facts {};
  if (::lstat(name.c_str(), &facts) == 0 && !S_ISREG(facts.st_mode) && !S_ISLNK(facts.st_mode))
    return bad_input(printable(name, 4096) + ": expected a regular file to replace or nothing, got something else");
  if (::fsync(file_) != 0) return errno_status(path_, "cannot sync", errno);
  if (::rename(path_.c_str(), name.c_str()) != 0) return errno_status(path_, "cannot rename into place", errno);
  ::close(std::exchange(file_, -1));
  return sync_directory(fs::path(name).parent_path().string());
}

int sweep_cache_parts(const std::string& directory) {
  int removed = 0;
  const auto names = list_directory(directory);
  if (!names.ok()) return 0;
  for (const std::string& name : *names)
    if (is_part_name(name) && remove_if_dead((fs::path(directory) / name).string(), name)) ++removed;
  return removed;
}

}  // namespace nvfp4_moe
