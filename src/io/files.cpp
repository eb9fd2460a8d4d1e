// Reads whole text files. See files.h.
#include "io/files.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>

#include "io/open_file.h"

namespace nvfp4_moe::internal {
bool is_git_lfs_pointer(std::string_view head) {
  return head.starts_with("version https://git-lfs.github.com/spec/");
}

Status git_lfs_pointer_status() {
  return bad_input(
      "expected the file itself, got a Git-LFS pointer to it: run `git lfs pull` in its directory, "
      "or download the "
      "file");
}

Status errno_status(const std::string& path, std::string_view what, int error_number) {
  return Status(error_number == ENOMEM ? Code::kOutOfMemory : Code::kIo,
                fmt::format("{}: {}: {}", printable(path, 4096), what,
                            std::generic_category().message(error_number)));
}

Result<std::vector<std::string>> list_directory(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(path.c_str()), ::closedir);
  if (entries == nullptr) return errno_status(path, "cannot list", errno);
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(entries.get());
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) return errno_status(path, "cannot list", errno);
  std::sort(names.begin(), names.end());
  return names;
}

Result<bool> has_entry(const std::string& path) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return errno_status(path, "cannot look up", errno);
}

namespace {

// The file's first bytes: size_bytes, or fewer if the file is shorter.
Result<std::string> read_bytes(const RegularFile& file, const std::string& path,
                               size_t size_bytes) {
  std::string text(size_bytes, '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = ::read(file.descriptor.get(), text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(path, "cannot read", errno);
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  text.resize(filled);
  return text;
}

}  // namespace

Result<std::string> read_first_bytes(const std::string& path, size_t max_bytes) {
  NVFP4_MOE_ASSIGN(const RegularFile file, open_regular_file(path));
  return read_bytes(file, path, max_bytes);
}

Result<std::string> read_text_file(const std::string& path, size_t max_bytes) {
  NVFP4_MOE_ASSIGN(const RegularFile file, open_regular_file(path));
  const auto size = static_cast<uint64_t>(file.facts.st_size);
  if (size > max_bytes)
    return bad_input(fmt::format("{}: expected at most {} bytes, got {}", printable(path, 4096),
                                 max_bytes, size));
  NVFP4_MOE_ASSIGN(std::string text, read_bytes(file, path, static_cast<size_t>(size)));
  if (is_git_lfs_pointer(text)) return git_lfs_pointer_status().in(printable(path, 4096));
  return text;
}

}  // namespace nvfp4_moe::internal
