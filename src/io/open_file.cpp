// Opens only regular files for reading. See open_file.h.
#include "io/open_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>

#include "io/files.h"

namespace nvfp4_moe::internal {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISLNK(mode)) return "a symbolic link";
  return "something else";
}

Result<RegularFile> open_regular_file(const std::string& path, Links links) {
  // O_NONBLOCK: otherwise opening a FIFO without a writer would wait forever.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (links == Links::kRefuse ? O_NOFOLLOW : 0);
  RegularFile file{Descriptor(::open(path.c_str(), flags)), {}};
  if (file.descriptor.get() < 0) return errno_status(path, "cannot open", errno);
  if (::fstat(file.descriptor.get(), &file.facts) != 0)
    return errno_status(path, "cannot stat", errno);
  if (!S_ISREG(file.facts.st_mode))
    return bad_input(fmt::format("{}: expected a regular file, got {}", printable(path, 4096),
                                 kind_of(file.facts.st_mode)));
  return file;
}

}  // namespace nvfp4_moe::internal
