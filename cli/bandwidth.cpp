#include "cli/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>

namespace nvfp4_moe::cli {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;

// Eight independent sums, so that the loop waits for memory and not for additions.
uint64_t sum_chunk(const std::byte* data, int64_t size_bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < size_bytes; i += static_cast<int64_t>(sizeof sums)) {
    uint64_t words[8];
    std::memcpy(words, data + i, sizeof words);
    for (int j = 0; j < 8; ++j) sums[j] += words[j];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace

uint64_t last_level_cache_bytes() {
  uint64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    uint64_t size = 0;
    char unit = 0;
    if (file >> size) {
      file >> unit;
      largest = std::max(largest, unit == 'M' ? size << 20 : unit == 'K' ? size << 10 : size);
    }
  }
  return largest > 0 ? largest : uint64_t{32} << 20;
}

Result<ReadBandwidth> ReadBandwidth::make(uint64_t memory_bytes) {
  const uint64_t wanted = std::max(uint64_t{256} << 20, 4 * last_level_cache_bytes());
  const uint64_t size = std::min(wanted, memory_bytes / 8) / kChunkBytes * kChunkBytes;
  ReadBandwidth bandwidth;
  NVFP4_MOE_ASSIGN(bandwidth.buffer_, allocate_pages(std::max<uint64_t>(size, kChunkBytes)));
  // Pages that were never written all map to one page of zeros, which would measure the cache.
  std::memset(bandwidth.buffer_.data(), 1, bandwidth.buffer_.size_bytes());
  return bandwidth;
}

double ReadBandwidth::measure(Executor& executor) const {
  const auto chunks = static_cast<int64_t>(buffer_.size_bytes()) / kChunkBytes;
  double best = 0;
  for (int pass = 0; pass < 3; ++pass) {
    std::atomic<uint64_t> total{0};
    const auto start = std::chrono::steady_clock::now();
    executor.parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        total.fetch_add(sum_chunk(buffer_.data() + i * kChunkBytes, kChunkBytes), std::memory_order_relaxed);
      }
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (total.load() != 0) best = std::max(best, static_cast<double>(buffer_.size_bytes()) / seconds);
  }
  return best;
}

}  // namespace nvfp4_moe::cli
