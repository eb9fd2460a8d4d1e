// Temporary file, sync, rename, sync of the folder. See output_file.h.
#include "io/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <new>
#include <vector>

#include "io/files.h"
#include "io/open_file.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBufferBytes = size_t{1} << 20;  // otherwise each scalar would cost a system call
constexpr int kMostAttempts = 100;  // to get the temporary name while other writers come and go

Status refuse_kind(const std::string& path, mode_t mode) {
  return invalid_argument(fmt::format("{}: expected a regular file to replace or nothing, got {}",
                                      printable(path, 4096), kind_of(mode)));
}

// Checks that the name is free or is a regular file.
Status check_replaceable(const std::string& path) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0)
    return errno == ENOENT ? Status() : errno_status(path, "cannot be written", errno);
  return S_ISREG(facts.st_mode) ? Status() : refuse_kind(path, facts.st_mode);
}

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Whether `path` still is the name of the open file.
bool is_named(int fd, const std::string& path) {
  struct stat held {};
  struct stat named {};
  return ::fstat(fd, &held) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

// Whether another open file holds the lock. On a file system without locks, false.
bool is_locked(int fd) { return ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; }

// Removes the file of a killed writer. A living writer's file is locked and stays.
Status remove_stale(const std::string& partial) {
  struct stat facts {};
  if (::lstat(partial.c_str(), &facts) != 0)
    return errno == ENOENT ? Status() : errno_status(partial, "stat", errno);
  if (!S_ISREG(facts.st_mode)) return refuse_kind(partial, facts.st_mode);
  const int fd = ::open(partial.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT ? Status() : errno_status(partial, "cannot open", errno);
  const Descriptor opened{fd};
  if (is_locked(fd))
    return {Code::kBusy, fmt::format("{}: another writer holds it", printable(partial, 4096))};
  if (is_named(fd, partial) && ::unlink(partial.c_str()) != 0 && errno != ENOENT)
    return errno_status(partial, "cannot remove", errno);
  return {};
}

int sync_descriptor(int fd) {
  int result = 0;
  do result = ::fsync(fd);
  while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

std::string partial_path(const std::string& path) { return path + ".nvfp4-moe.partial"; }

struct OutputFile::Impl {
  std::string path;
  std::string partial;
  unsigned mode = kFileMode;
  int fd = -1;
  bool finished = false;
  Status failure;  // of an earlier call: the file can no longer be completed
  std::vector<std::byte> buffer;

  ~Impl() { discard(); }

  // The lock is released last, so no other writer can have taken the name meanwhile.
  void discard() {
    if (fd < 0) return;
    if (!finished) ::unlink(partial.c_str());
    ::close(fd);
    fd = -1;
  }
  Status fail(Status status) {
    failure = std::move(status);
    discard();
    return failure;
  }
  Status create_partial();
  Status write_all(const std::byte* data, size_t size);
};

// Creates and locks a new file under the temporary name. Between its creation and the lock, another
// writer may take it for a stale one and remove it. The name is then no longer this file's, and the
// loop tries again.
Status OutputFile::Impl::create_partial() {
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    fd = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
    if (fd >= 0) {
      if (!is_locked(fd) && is_named(fd, partial)) return {};
      ::close(fd);
      fd = -1;
    } else if (errno == EEXIST) {
      NVFP4_MOE_TRY(remove_stale(partial));
    } else {
      return errno_status(partial, "cannot create", errno);
    }
  }
  return {Code::kBusy, fmt::format("{}: another writer holds it", printable(partial, 4096))};
}

Status OutputFile::Impl::write_all(const std::byte* data, size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(fd, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0)
      return fail(errno_status(partial, "cannot write", written < 0 ? errno : ENOSPC));
    data += written;
    size -= static_cast<size_t>(written);
  }
  return {};
}

Result<OutputFile> OutputFile::create(const std::string& path, unsigned mode) {
  NVFP4_MOE_TRY(check_replaceable(path));
  OutputFile file;
  file.impl_->path = path;
  file.impl_->partial = partial_path(path);
  file.impl_->mode = mode;
  NVFP4_MOE_TRY(file.impl_->create_partial());
  return file;
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(impl.failure);
  if (impl.fd < 0)
    return invalid_argument(fmt::format("{}: finished already", printable(impl.path, 4096)));
  if (impl.buffer.size() + bytes.size() > kBufferBytes) {
    NVFP4_MOE_TRY(impl.write_all(impl.buffer.data(), impl.buffer.size()));
    impl.buffer.clear();
  }
  if (bytes.size() > kBufferBytes) return impl.write_all(bytes.data(), bytes.size());
  impl.buffer.insert(impl.buffer.end(), bytes.begin(), bytes.end());
  return {};
}

Status OutputFile::sync() {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(impl.failure);
  if (impl.fd < 0)
    return invalid_argument(fmt::format("{}: finished already", printable(impl.path, 4096)));
  NVFP4_MOE_TRY(impl.write_all(impl.buffer.data(), impl.buffer.size()));
  impl.buffer.clear();
  if (sync_descriptor(impl.fd) != 0)
    return impl.fail(errno_status(impl.partial, "cannot sync", errno));
  return {};
}

Status OutputFile::set_mode(unsigned permissions) {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(impl.failure);
  if (::fchmod(impl.fd, static_cast<mode_t>(permissions)) != 0)
    return impl.fail(errno_status(impl.partial, "cannot set its permissions", errno));
  return {};
}

Status OutputFile::finish() {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(sync());
  // Checks again, since something may have appeared under the name while the bytes were made.
  if (Status status = check_replaceable(impl.path); !status.ok())
    return impl.fail(std::move(status));
  if (std::rename(impl.partial.c_str(), impl.path.c_str()) != 0)
    return impl.fail(errno_status(impl.path, "cannot rename into place", errno));
  impl.finished = true;
  const int closed = ::close(impl.fd);
  const int reason = errno;
  impl.fd = -1;
  if (closed != 0 && reason != EINTR)
    return impl.failure = errno_status(impl.path, "cannot close", reason);
  return impl.failure = sync_directory(folder_of(impl.path));  // the rename is durable from here
}

OutputFile::OutputFile() : impl_(std::make_unique<Impl>()) {}
OutputFile::OutputFile(OutputFile&&) noexcept = default;
OutputFile& OutputFile::operator=(OutputFile&&) noexcept = default;
OutputFile::~OutputFile() = default;

Result<std::string> output_path(const std::string& path) {
  if (path.empty())
    return invalid_argument("expected the name of a file to write, got an empty one");
  std::string target = path;
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) == 0 && S_ISLNK(facts.st_mode)) {
    std::error_code error;
    target = fs::canonical(path, error).string();
    if (error == std::errc::not_enough_memory)
      return errno_status(path, "cannot resolve", error.value());
    if (error)
      return invalid_argument(fmt::format("{}: a symbolic link that leads nowhere: {}",
                                          printable(path, 4096), error.message()));
  }
  const Status status = check_replaceable(target);
  if (!status.ok()) return target == path ? status : status.in(printable(path, 4096));
  const std::string folder = folder_of(target);
  if (::stat(folder.c_str(), &facts) != 0)
    return errno_status(folder, "cannot be written to", errno);
  if (!S_ISDIR(facts.st_mode)) return errno_status(folder, "cannot be written to", ENOTDIR);
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    return errno_status(folder, "cannot be written to", errno);
  if (::access(target.c_str(), W_OK) != 0 && errno != ENOENT)
    return errno_status(target, "cannot be written", errno);
  return target;
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat of_a {};
  struct stat of_b {};
  const bool a_is = ::stat(a.c_str(), &of_a) == 0, b_is = ::stat(b.c_str(), &of_b) == 0;
  if (a_is || b_is) return a_is && b_is && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
  const auto resolved = [](const std::string& path) {
    std::error_code error;
    fs::path real = fs::weakly_canonical(fs::absolute(path), error);
    if (error == std::errc::not_enough_memory) throw std::bad_alloc();
    return real;
  };
  return resolved(a) == resolved(b);
}

Status write_text_file(const std::string& path, std::string_view text) {
  NVFP4_MOE_ASSIGN(OutputFile file, OutputFile::create(path));
  NVFP4_MOE_TRY(file.write(std::as_bytes(std::span(text))));
  return file.finish();
}

Status copy_file(const std::string& from, const std::string& to) {
  NVFP4_MOE_ASSIGN(const RegularFile source, open_regular_file(from, Links::kRefuse));
  const unsigned mode = source.facts.st_mode & 0777;
  NVFP4_MOE_ASSIGN(
      OutputFile file,
      OutputFile::create(to, mode));  // users who cannot read the source cannot read the copy
  std::vector<std::byte> bytes(kBufferBytes);
  for (;;) {
    const ssize_t got = ::read(source.descriptor.get(), bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(from, "cannot read", errno);
    if (got == 0) break;
    NVFP4_MOE_TRY(file.write({bytes.data(), static_cast<size_t>(got)}));
  }
  NVFP4_MOE_TRY(file.set_mode(mode));
  return file.finish();
}

Status remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    return errno_status(path, "cannot remove", errno);
  return {};
}

Status make_directories(const std::string& path, unsigned mode) {
  fs::path made;
  std::string parent;
  for (const fs::path& part : fs::path(path)) {
    if (part.empty()) continue;  // after a trailing slash
    parent = made.empty() ? "." : made.string();
    made /= part;
    if (::mkdir(made.c_str(), mode) == 0) {
      NVFP4_MOE_TRY(sync_directory(parent));
      continue;
    }
    const int reason = errno;
    std::error_code error;
    if (!fs::is_directory(made, error))
      return errno_status(made.string(), "cannot create the directory",
                          reason == EEXIST ? ENOTDIR : reason);
  }
  // The last folder may be from a run that was killed before this sync.
  return sync_directory(parent);
}

Status sync_directory(const std::string& directory) {
  const int fd =
      ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    // A folder may be writable but not readable. Its names are then durable once the system writes
    // them back.
    return errno == EACCES ? Status() : errno_status(directory, "cannot open", errno);
  }
  const Descriptor opened{fd};
  return sync_directory(fd, directory);
}

Status sync_directory(int descriptor, const std::string& directory) {
  if (sync_descriptor(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EROFS &&
      errno != ENOSYS)
    return errno_status(directory, "cannot sync", errno);
  return {};
}

}  // namespace nvfp4_moe::internal
