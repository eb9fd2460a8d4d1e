// Waiting for other ranks' devices (backend/device_peers.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/system.cuh"
#include "backend/device_peers.h"

namespace nvfp4_moe::internal::cuda {

__device__ inline PeerControl* control_of(const PeerLink& link, int rank) {
  return reinterpret_cast<PeerControl*>(link.control.of_rank[rank]);
}

// Maximum number of CTAs that may wait for other ranks at once. More could fill the device and
// starve kernels in other streams that a rank must run before it arrives. A larger grid is preceded
// by one warp that waits until each rank's own kernel runs; after that, the grid's waits need
// nothing more from this device.
inline constexpr int64_t kWaitingCtas = 64;

// After a stop nothing is waited for, and nothing is written to other ranks, which may be gone. A
// stop is final, but threads of one CTA may see it at different times.
__device__ inline bool is_stopped(const PeerWait& wait) {
  return ptx::load_volatile(&wait.control->stop) != 0;
}
// Checks is_stopped before a write or a flag for another rank. If true, it also reports to the host
// that the run is incomplete.
__device__ inline bool leaves_out(const PeerWait& wait) {
  if (!is_stopped(wait)) return false;
  ptx::store_volatile(&wait.host->stopped, 1);
  return true;
}

// Polls until there() holds. Called by one thread. rank(): the rank that is waited for, called only
// if it is late. False: it is late, or the host has stopped the run. After that nothing waits any
// more.
template <class Rank, class There>
__device__ bool wait_for_rank(const PeerWait& wait, const Rank& rank, const There& there) {
  constexpr int kQuickPolls = 64;  // before reading the clock and the stop word
  constexpr unsigned kPauseNs = 100;
  for (int poll = 0; poll < kQuickPolls; ++poll)
    if (there()) return true;
  const uint64_t begin = ptx::global_timer();
  while (!there()) {
    if (is_stopped(wait)) {
      ptx::store_volatile(&wait.host->stopped, 1);
      return false;
    }
    if (ptx::global_timer() - begin > wait.timeout_ns) {
      ptx::store_volatile(&wait.host->late, static_cast<uint32_t>(rank()) + 1);
      ptx::store_volatile(&wait.control->stop, 1);
      return false;
    }
    __nanosleep(kPauseNs);
  }
  return true;
}

// The flag of the current run of all_to_all, written after a packet or a row. Fresh memory never
// contains a run's flag. Read from L2, since kernels read it before they wait for the preceding
// kernel.
__device__ inline uint64_t word_from_l2(const uint64_t& word) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(&word));
}
__device__ inline uint32_t flag_of_packets(const PeerControl* own) {
  return static_cast<uint32_t>(word_from_l2(own->dispatch_of_rows) + 1);
}
__device__ inline uint32_t flag_of_rows(const PeerControl* own) {
  return static_cast<uint32_t>(word_from_l2(own->dispatch));
}

}  // namespace nvfp4_moe::internal::cuda
