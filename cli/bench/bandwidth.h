// Read bandwidth of this host. It is measured in the same run as the times that are compared with
// it, because on shared machines memory speed changes by a factor of two within minutes.
#pragma once

#include <cstdint>

#include "core/buffer.h"
#include "core/executor.h"

namespace nvfp4_moe::internal::cli {

// Size of the last-level cache; 32 MiB if the system does not report it.
uint64_t last_level_cache_bytes();

class ReadBandwidth {
 public:
  // The buffer is four times the last-level cache, at least 256 MiB, at most an eighth of memory.
  static Result<ReadBandwidth> make(uint64_t memory_bytes, Executor& executor);
  // Bytes per second of all threads together, each reading its own part; the fastest of several
  // ways to read. Each way reads the stretch of the buffer that was read least recently.
  double measure(Executor& executor);
  uint64_t size_bytes() const { return buffer_.size_bytes(); }

 private:
  Buffer buffer_;
  uint64_t next_ = 0;  // the stretch to read next
};

}  // namespace nvfp4_moe::internal::cli
