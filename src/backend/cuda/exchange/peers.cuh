// Waiting for other ranks' devices (backend/device_peers.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/system.cuh"
#include "backend/device_peers.h"

namespace nvfp4_moe::cuda {

__device__ inline PeerControl* control_of(const PeerLink& link, int rank) {
  return reinterpret_cast<PeerControl*>(link.control.of_rank[rank]);
}

// CTAs that may wait for other ranks at once. More could take the whole device, from kernels of other streams too that a rank may
// need before it comes. Of more, a warp waits first until each rank's own kernel runs: what is then still to come needs nothing of
// this device.
inline constexpr int64_t kWaitingCtas = 64;

// Nothing is waited for any more, nor written to the others, who may be gone. It never ends, but threads of one CTA may see it
// begin at different times.
__device__ inline bool is_stopped(const PeerWait& wait) { return ptx::load_volatile(&wait.control->stop) != 0; }
// The same for who would write or say that something has come: where it does not, the host hears that a run is without it.
__device__ inline bool leaves_out(const PeerWait& wait) {
  if (!is_stopped(wait)) return false;
  ptx::store_volatile(&wait.host->stopped, 1);
  return true;
}

// Looks until there() holds. By one thread. rank(): who is waited for, asked for where it does not come. False: it did not
// come in time, or the host said stop; then, and in whatever comes later, nothing is waited for.
template <class Rank, class There>
__device__ bool wait_for_rank(const PeerWait& wait, const Rank& rank, const There& there) {
  constexpr int kQuickLooks = 64;  // before it looks at anything else
  constexpr unsigned kPauseNs = 100;
  for (int look = 0; look < kQuickLooks; ++look)
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

// The mark of the run of all_to_all that is on its way: what stands behind a record or a row that has come. Fresh memory
// has none. From L2: kernels ask before they have waited for the one before them.
__device__ inline uint64_t word_from_l2(const uint64_t& word) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(&word));
}
__device__ inline uint32_t mark_of_records(const PeerControl* own) {
  return static_cast<uint32_t>(word_from_l2(own->dispatch_of_rows) + 1);
}
__device__ inline uint32_t mark_of_rows(const PeerControl* own) {
  return static_cast<uint32_t>(word_from_l2(own->dispatch));
}

}  // namespace nvfp4_moe::cuda
