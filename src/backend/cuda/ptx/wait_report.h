// Waits that took too long, as kernels built with NVFP4_MOE_BOUNDED_WAITS report them to the host.
// Only the acceptance's ladder (tests/acceptance/ladder.cpp) runs such kernels. It maps this page
// of pinned memory, which survives a trap, at one address for host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda::ptx {

// One warp's wait. The file is known by a hash of its last two path components (wait_file_hash).
struct alignas(16) LateWait {
  uint32_t file, at;     // hash of the file, and position in it, of the call
  uint32_t barrier;      // its address in shared memory, or 0
  uint32_t parity;       // of the phase that did not complete
  uint32_t cta, thread;  // of the warp's first waiting lane
  uint32_t begin_us;     // of the device's global timer: the first to begin is the likely cause
  uint32_t written;      // 1
};
inline constexpr uint32_t kMaxLateWaits = 1024;

struct WaitReport {
  uint32_t limit_us;  // a wait is reported after it, and traps a quarter of it later
  // Faults for the ladder's rehearsal, in ctas of plant_threads threads (0: of any number).
  uint32_t plant_bytes;   // that a barrier expects in addition
  uint32_t plant_stride;  // flipped bits in the stride of a matrix descriptor
  uint32_t plant_threads;
  uint32_t waits_claimed;  // may exceed kMaxLateWaits
  LateWait waits[kMaxLateWaits];
  uint32_t plant_least_bytes;  // plant_bytes only for barriers that expect at least these
};
// In the address space of x86-64 and aarch64, far from what systems map by themselves.
inline constexpr uint64_t kWaitReportAddress = uint64_t{0x6000} << 32;

// FNV-1a of the last two components of a path, such as sm90/producer.cuh.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t wait_file_hash(const char* path) {
  int begin = 0, length = 0;
  for (int slash = -1; path[length] != 0; ++length)
    if (path[length] == '/') begin = slash + 1, slash = length;
  uint32_t hash = 2166136261u;
  for (int i = begin; i < length; ++i) hash = (hash ^ static_cast<uint8_t>(path[i])) * 16777619u;
  return hash;
}

}  // namespace nvfp4_moe::internal::cuda::ptx
