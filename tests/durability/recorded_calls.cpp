#include "durability/recorded_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <optional>

namespace nvfp4_moe::internal::test {
namespace {

struct OpenFile {
  std::string path;   // absolute
  int64_t file = -1;  // -1: a folder
};

struct State {
  std::recursive_mutex mutex;
  std::string folder;  // of the record; empty: none
  std::vector<RecordedCall> calls;
  std::map<std::string, int64_t> files;  // absolute path -> number
  std::map<int, OpenFile> open;
  int64_t next_file = 0;

  std::string fault_folder;
  Fault fault;
  int64_t seen = 0, hit = 0;
};
State& state() {
  static State* const value = new State;  // never destroyed: calls arrive until the process ends
  return *value;
}

bool below(const std::string& folder, const std::string& path) {
  return !folder.empty() && path.starts_with(folder) &&
         (path.size() == folder.size() || path[folder.size()] == '/');
}

std::string absolute(const char* path) {
  if (path[0] == '/') return path;
  char here[4096];
  return ::getcwd(here, sizeof here) == nullptr ? path : std::string(here) + "/" + path;
}

std::string path_of(int fd) {
  char path[4096];
  const ssize_t size =
      ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  return size < 0 ? "" : std::string(path, static_cast<size_t>(size));
}

void record(RecordedCall call) {
  State& s = state();
  const auto relative = [&](std::string& path) {
    path = path.size() <= s.folder.size() ? "" : path.substr(s.folder.size() + 1);
  };
  relative(call.path);
  if (call.kind == CallKind::kRename) relative(call.to);
  s.calls.push_back(std::move(call));
}

// Whether the fault applies to this call.
bool faulty(const char* call, const std::string& path) {
  State& s = state();
  if (!below(s.fault_folder, path) || s.fault.call != call) return false;
  const int64_t number = s.seen++;
  if (number < s.fault.first || number - s.fault.first >= s.fault.count) return false;
  ++s.hit;
  return true;
}

// A file has been opened: whether it is new, cut, or neither.
void note_open(int fd, const std::string& path, bool existed, bool cut) {
  State& s = state();
  if (fd < 0 || !below(s.folder, path)) return;
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) return;
  OpenFile opened{path, -1};
  if (S_ISREG(facts.st_mode)) {
    if (!existed) {
      s.files[path] = s.next_file++;
      record({CallKind::kCreate, path, "", s.files[path], 0, ""});
    } else if (cut && s.files.contains(path)) {
      record({CallKind::kTruncate, path, "", s.files[path], 0, ""});
    }
    const auto known = s.files.find(path);
    if (known == s.files.end()) return;  // from before the record, only read
    opened.file = known->second;
  } else if (!S_ISDIR(facts.st_mode)) {
    return;
  }
  s.open[fd] = opened;
}

bool exists(const std::string& path) {
  struct stat facts {};
  return ::lstat(path.c_str(), &facts) == 0;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

int opened(const char* path, int flags, mode_t mode) {
  static auto* const function = real<int(const char*, int, ...)>("open");
  const std::scoped_lock lock(state().mutex);
  const std::string full = absolute(path);
  if ((flags & O_CREAT) != 0 && faulty("open", full)) {
    errno = state().fault.error;
    return -1;
  }
  const bool existed = exists(full);
  const int fd = function(path, flags, mode);
  const int reason = errno;
  note_open(fd, full, existed, (flags & O_TRUNC) != 0);
  errno = reason;
  return fd;
}

FILE* opened_stream(const char* path, const char* mode) {
  static auto* const function = real<FILE*(const char*, const char*)>("fopen");
  const std::scoped_lock lock(state().mutex);
  const std::string full = absolute(path);
  const bool existed = exists(full);
  FILE* const stream = function(path, mode);
  if (stream != nullptr) note_open(::fileno(stream), full, existed, mode[0] == 'w');
  return stream;
}

int synced(int fd) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (faulty("fsync", path_of(fd))) {
    errno = s.fault.error;
    return -1;
  }
  const auto file = s.open.find(fd);
  if (file != s.open.end())
    record({file->second.file < 0 ? CallKind::kSyncFolder : CallKind::kSync, file->second.path, "",
            file->second.file, 0, ""});
  return 0;
}

int removed(const char* path) {
  static auto* const function = real<int(const char*)>("unlink");
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  const int result = function(path);
  const std::string full = absolute(path);
  if (result == 0 && below(s.folder, full)) {
    record({CallKind::kUnlink, full, "", -1, 0, ""});
    s.files.erase(full);
  }
  return result;
}

}  // namespace

RecordedCalls::RecordedCalls(const std::filesystem::path& folder) {
  const std::scoped_lock lock(state().mutex);
  state().folder = std::filesystem::absolute(folder).string();
  state().calls.clear();
  state().files.clear();
  state().open.clear();
  // Existing files get a number too; their content is on disk.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) state().files[entry.path().string()] = state().next_file++;
}
RecordedCalls::~RecordedCalls() {
  const std::scoped_lock lock(state().mutex);
  state().folder.clear();
}
const std::vector<RecordedCall>& RecordedCalls::calls() const { return state().calls; }

InjectedFault::InjectedFault(const std::filesystem::path& folder, const Fault& fault) {
  const std::scoped_lock lock(state().mutex);
  state().fault_folder = std::filesystem::absolute(folder).string();
  state().fault = fault;
  state().seen = state().hit = 0;
}
InjectedFault::~InjectedFault() {
  const std::scoped_lock lock(state().mutex);
  state().fault_folder.clear();
}
int64_t InjectedFault::seen() const { return state().seen; }
int64_t InjectedFault::hit() const { return state().hit; }

}  // namespace nvfp4_moe::internal::test

using namespace nvfp4_moe::internal::test;

// The C library's functions, for everything in this process.
extern "C" {

// The mode is passed in a register, and only read if the flags require it.
int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = static_cast<mode_t>(va_arg(arguments, unsigned));
  va_end(arguments);
  return opened(path, flags, mode);
}
int open64(const char* path, int flags, ...) __attribute__((alias("open")));

FILE* fopen(const char* path, const char* mode) { return opened_stream(path, mode); }
FILE* fopen64(const char* path, const char* mode) { return opened_stream(path, mode); }

ssize_t write(int fd, const void* data, size_t size) {
  static auto* const function = real<ssize_t(int, const void*, size_t)>("write");
  auto& s = state();
  const std::scoped_lock lock(s.mutex);
  if (!s.fault_folder.empty() && faulty("write", path_of(fd))) {
    if (s.fault.error != 0) {
      errno = s.fault.error;
      return -1;
    }
    size = (size + 1) / 2;
  }
  const ssize_t written = function(fd, data, size);
  const int reason = errno;
  const auto file = s.open.find(fd);
  if (written > 0 && !s.folder.empty() && file != s.open.end()) {
    const auto end = static_cast<uint64_t>(::lseek(fd, 0, SEEK_CUR));
    record({CallKind::kWrite, file->second.path, "", file->second.file,
            end - static_cast<uint64_t>(written),
            std::string(static_cast<const char*>(data), static_cast<size_t>(written))});
  }
  errno = reason;
  return written;
}

int ftruncate(int fd, off_t size) {
  static auto* const function = real<int(int, off_t)>("ftruncate");
  auto& s = state();
  const std::scoped_lock lock(s.mutex);
  const int result = function(fd, size);
  const auto file = s.open.find(fd);
  if (result == 0 && !s.folder.empty() && file != s.open.end())
    record({CallKind::kTruncate, file->second.path, "", file->second.file,
            static_cast<uint64_t>(size), ""});
  return result;
}

int fsync(int fd) { return synced(fd); }
int fdatasync(int fd) { return synced(fd); }

int close(int fd) {
  static auto* const function = real<int(int)>("close");
  auto& s = state();
  const std::scoped_lock lock(s.mutex);
  s.open.erase(fd);
  const bool fault = !s.fault_folder.empty() && s.fault.call == "close" &&
                     (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY && faulty("close", path_of(fd));
  const int result = function(fd);
  if (!fault) return result;
  errno = s.fault.error;
  return -1;
}

int rename(const char* from, const char* to) {
  static auto* const function = real<int(const char*, const char*)>("rename");
  auto& s = state();
  const std::scoped_lock lock(s.mutex);
  const std::string source = absolute(from), target = absolute(to);
  if (faulty("rename", source)) {
    errno = s.fault.error;
    return -1;
  }
  const int result = function(from, to);
  if (result == 0 && below(s.folder, source)) {
    record({CallKind::kRename, source, target, s.files[source], 0, ""});
    s.files[target] = s.files[source];
    s.files.erase(source);
  }
  return result;
}

int unlink(const char* path) { return removed(path); }

int mkdir(const char* path, mode_t mode) {
  static auto* const function = real<int(const char*, mode_t)>("mkdir");
  auto& s = state();
  const std::scoped_lock lock(s.mutex);
  const int result = function(path, mode);
  const std::string full = absolute(path);
  if (result == 0 && below(s.folder, full)) record({CallKind::kMakeFolder, full, "", -1, 0, ""});
  return result;
}

}  // extern "C"
