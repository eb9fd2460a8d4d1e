// Memory of dropped experts, kept for the next one. Fresh pages for each expert of a layer would
// cost more than reading their bytes from the page cache. At most one expert's memory is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace nvfp4_moe::internal {

class ExpertMemory {
 public:
  // A vector of this size with unspecified bytes.
  std::vector<uint8_t> take(size_t size_bytes);
  void give(std::vector<std::vector<uint8_t>> storage);

 private:
  std::mutex mutex_;
  std::vector<std::vector<uint8_t>> spare_;
};

}  // namespace nvfp4_moe::internal
