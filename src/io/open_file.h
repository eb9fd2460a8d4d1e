// Opens regular files for reading, and refuses anything else under the name. Private to src/io.
#pragma once

#include <sys/stat.h>

#include <string>
#include <utility>

#include "core/status.h"

namespace nvfp4_moe::internal {

// Closes the descriptor at the end of the block, also if an allocation fails.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }  // the caller closes it

 private:
  int fd_;
};

enum class Links { kFollow, kRefuse };

struct RegularFile {
  Descriptor descriptor;
  struct stat facts;
};
// Opens for reading. kIo with the system's reason, also for a link if links are refused. kBadInput
// with the kind if it is not a regular file. Does not wait for a writer of a FIFO.
Result<RegularFile> open_regular_file(const std::string& path, Links links = Links::kFollow);

const char* kind_of(mode_t mode);  // "a FIFO"

}  // namespace nvfp4_moe::internal
