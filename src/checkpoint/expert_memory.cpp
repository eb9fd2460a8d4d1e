#include "checkpoint/expert_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/checkpoint.h"

namespace nvfp4_moe::internal {

std::vector<uint8_t> ExpertMemory::take(size_t size_bytes) {
  std::vector<uint8_t> found;
  {
    const std::lock_guard lock(mutex_);
    // Takes the smallest that is large enough, so that a scale does not take a matrix's memory.
    auto best = spare_.end();
    for (auto one = spare_.begin(); one != spare_.end(); ++one)
      if (one->size() >= size_bytes && (best == spare_.end() || one->size() < best->size()))
        best = one;
    if (best != spare_.end()) {
      found = std::move(*best);
      spare_.erase(best);
    }
  }
  found.resize(size_bytes);
  return found;
}

void ExpertMemory::give(std::vector<std::vector<uint8_t>> storage) {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) spare_ = std::move(storage);
}

const float* LoadedExpert::keep(const std::vector<float>& bias) {
  if (bias.empty()) return nullptr;
  std::vector<uint8_t>& bytes = storage.emplace_back(bias.size() * sizeof(float));
  std::memcpy(bytes.data(), bias.data(), bytes.size());
  return reinterpret_cast<const float*>(bytes.data());  // memory from new is aligned for any number
}

LoadedExpert::~LoadedExpert() {
  if (memory != nullptr && !storage.empty()) memory->give(std::move(storage));
}

}  // namespace nvfp4_moe::internal
