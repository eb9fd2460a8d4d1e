// Opening what is to be read: regular files alone, whatever lies under the name. Private to the
// room.
#pragma once

#include <sys/stat.h>

#include <string>
#include <utility>

#include "core/status.h"

namespace nvfp4_moe::internal {

// Closed whatever ends the block, an allocation that fails included.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }  // the caller's to close

 private:
  int fd_;
};

enum class Links { kFollow, kRefuse };

struct RegularFile {
  Descriptor descriptor;
  struct stat facts;
};
// For reading. kIo with the system's reason, which a link is too if links are refused; kBadInput,
// naming the kind, if it is not a regular file. A FIFO without a writer is not waited for.
Result<RegularFile> open_regular_file(const std::string& path, Links links = Links::kFollow);

const char* kind_of(mode_t mode);  // "a FIFO"

}  // namespace nvfp4_moe::internal
