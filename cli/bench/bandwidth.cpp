#include "cli/bench/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <span>
#include <string>

#include "backend/cpu/target.h"
#include "cli/bench/all_threads.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct ReadShape {
  int streams;
  uint64_t (*read)(const std::byte* data, int64_t stream_bytes);
};

namespace portable {
constexpr size_t kVectorBytes = 16;
#include "cli/bench/read_streams.h"
}  // namespace portable

#if defined(__x86_64__)
NVFP4_MOE_TARGET_BEGIN("avx2")
namespace avx2 {
constexpr size_t kVectorBytes = 32;
#include "cli/bench/read_streams.h"
}  // namespace avx2
NVFP4_MOE_TARGET_END

NVFP4_MOE_TARGET_BEGIN("avx512f")
namespace avx512 {
constexpr size_t kVectorBytes = 64;
#include "cli/bench/read_streams.h"
}  // namespace avx512
NVFP4_MOE_TARGET_END
#endif

std::span<const ReadShape> read_shapes() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return avx512::kShapes;
  if (__builtin_cpu_supports("avx2")) return avx2::kShapes;
#endif
  return portable::kShapes;
}

// Parts of the buffer. Two passes over all ways to read go through it twice.
constexpr uint64_t kStretches = 4;
constexpr int kPasses = 2;
constexpr uint64_t kFillBytes = 2 << 20;

}  // namespace

uint64_t last_level_cache_bytes() {
  uint64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    uint64_t size = 0;
    char unit = 0;
    if (file >> size) {
      file >> unit;
      largest = std::max(largest, unit == 'M' ? size << 20 : unit == 'K' ? size << 10 : size);
    }
  }
  return largest > 0 ? largest : uint64_t{32} << 20;
}

Result<ReadBandwidth> ReadBandwidth::make(uint64_t memory_bytes, Executor& executor) {
  const uint64_t wanted = std::max(uint64_t{256} << 20, 4 * last_level_cache_bytes());
  const uint64_t parts =
      std::max<uint64_t>(std::min(wanted, memory_bytes / 8) / kFillBytes, kStretches);
  ReadBandwidth bandwidth;
  NVFP4_MOE_ASSIGN(bandwidth.buffer_, allocate_pages(parts * kFillBytes));
  // Writes every page: unwritten pages all map to one page of zeros, which would be in the cache.
  executor.parallel_for(static_cast<int64_t>(parts), 1, [&](int64_t begin, int64_t end) {
    std::memset(bandwidth.buffer_.data() + static_cast<uint64_t>(begin) * kFillBytes, 1,
                static_cast<uint64_t>(end - begin) * kFillBytes);
  });
  return bandwidth;
}

double ReadBandwidth::measure(Executor& executor) {
  const auto threads = static_cast<uint64_t>(executor.threads());
  double best = 0;
  std::atomic<uint64_t> total{0};
  for (int pass = 0; pass < kPasses; ++pass) {
    for (const ReadShape& shape : read_shapes()) {
      const uint64_t stretch_bytes = buffer_.size_bytes() / kStretches;
      const std::byte* stretch = buffer_.data() + next_++ % kStretches * stretch_bytes;
      const auto streams = static_cast<uint64_t>(shape.streams);
      const uint64_t stream_bytes = stretch_bytes / (threads * streams) / 64 * 64;
      const double seconds = time_on_all_threads(executor, [&](int64_t thread) {
        const std::byte* part = stretch + static_cast<uint64_t>(thread) * streams * stream_bytes;
        total.fetch_add(shape.read(part, static_cast<int64_t>(stream_bytes)),
                        std::memory_order_relaxed);
      });
      best = std::max(best, static_cast<double>(threads * streams * stream_bytes) / seconds);
    }
  }
  return total.load() != 0 ? best : 0;
}

}  // namespace nvfp4_moe::internal::cli
