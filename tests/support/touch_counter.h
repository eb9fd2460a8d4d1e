// Which pages of a checkpoint's mappings this process touches, exactly: the mappings are made inaccessible, and a fault
// handler marks each page that is asked for and opens it. Unlike resident memory this does not depend on how many pages
// around a fault the kernel maps for free.
//
// One counter at a time; single-threaded tests only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "safetensors/safetensors.h"

namespace nvfp4_moe::test {

class TouchCounter {
 public:
  explicit TouchCounter(const TensorIndex& index);
  ~TouchCounter();
  TouchCounter(const TouchCounter&) = delete;
  TouchCounter& operator=(const TouchCounter&) = delete;

  uint64_t touched_bytes() const;                                          // whole pages
  uint64_t touched_bytes(const std::byte* data, size_t size_bytes) const;  // pages that overlap these bytes
};

}  // namespace nvfp4_moe::test
