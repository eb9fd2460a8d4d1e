#include "moe/cache_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "io/files.h"
#include "io/output_file.h"

namespace nvfp4_moe {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

bool is_ours(const struct stat& facts) { return facts.st_uid == ::geteuid() || facts.st_uid == 0; }

Status check_folder(const std::string& shown, const struct stat& facts) {
  if (!is_ours(facts))
    return bad_input(
        fmt::format("{}: expected a folder of user {} or of root, got one of user {}, who may put other "
                    "weights there: name a folder of your own",
                    shown, ::geteuid(), facts.st_uid));
  if ((facts.st_mode & kOthersWrite) != 0 && (facts.st_mode & S_ISVTX) == 0)
    return bad_input(
        fmt::format("{}: expected a folder that its owner only may write to, or one with the sticky bit, "
                    "got mode {:o}: chmod go-w it",
                    shown, facts.st_mode & 07777));
  return {};
}

}  // namespace

Result<CacheFolder> CacheFolder::open(const std::string& path, mode_t mode) {
  NVFP4_MOE_TRY(make_directories(path, mode));
  CacheFolder folder(path, ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
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

std::string CacheFolder::file(const std::string& name) const { return (fs::path(path_) / name).string(); }

Status check_cache_owner(const std::string& shown, const struct stat& facts) {
  if ((facts.st_mode & kOthersWrite) != 0)
    return bad_input(
        fmt::format("{}: expected a file that its owner only may write, got mode {:o}", shown, facts.st_mode & 0777));
  if (is_ours(facts)) return {};
  return bad_input(
      fmt::format("{}: expected a file of user {} or of root, got one of user {}", shown, ::geteuid(), facts.st_uid));
}

bool readable_by_everybody(const std::vector<std::unique_ptr<TensorFile>>& files) {
  for (const auto& file : files) {
    struct stat facts {};
    if (::fstat(file->descriptor(), &facts) != 0 || (facts.st_mode & S_IROTH) == 0) return false;
    std::error_code error;
    fs::path folder = fs::canonical(file->path(), error);  // links have no permissions of their own
    if (error) return false;
    while (folder.has_relative_path()) {
      folder = folder.parent_path();
      if (::stat(folder.c_str(), &facts) != 0 || (facts.st_mode & S_IXOTH) == 0) return false;
    }
  }
  return true;
}

}  // namespace nvfp4_moe
