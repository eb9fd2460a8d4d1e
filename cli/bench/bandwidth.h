// Read bandwidth of this host, measured in the same run as what is compared with it: on shared
// machines memory speed changes by a factor of two within minutes, so a number from another day
// says nothing.
#pragma once

#include <cstdint>

#include "core/buffer.h"
#include "core/executor.h"

namespace nvfp4_moe::internal::cli {

// Size of the last level of cache as the system tells it; 32 MiB if it does not.
uint64_t last_level_cache_bytes();

class ReadBandwidth {
 public:
  // A buffer of four times the last level of cache, at least 256 MiB, at most an eighth of memory.
  static Result<ReadBandwidth> make(uint64_t memory_bytes, Executor& executor);
  // Bytes per second of all threads at once, each reading a part of its own: the fastest of several
  // ways to read. Every one reads a stretch of the buffer that was not read since all the others
  // were.
  double measure(Executor& executor);
  uint64_t size_bytes() const { return buffer_.size_bytes(); }

 private:
  Buffer buffer_;
  uint64_t next_ = 0;  // the stretch to be read
};

}  // namespace nvfp4_moe::internal::cli
