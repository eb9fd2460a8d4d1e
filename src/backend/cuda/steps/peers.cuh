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

// Nothing is waited for any more, nor written to the others, who may be gone.
__device__ inline bool is_stopped(const PeerLink& link) {
  return ptx::load_volatile(&control_of(link, link.rank)->stop) != 0;
}

// Looks until there() holds. By one thread. False: the rank did not come in time, or the host said stop; then, and in
// whatever comes later, nothing is waited for.
template <class There>
__device__ bool wait_for_rank(const PeerLink& link, int rank, const There& there) {
  constexpr int kQuickLooks = 64;  // before it looks at anything else
  constexpr unsigned kPauseNs = 100;
  for (int look = 0; look < kQuickLooks; ++look)
    if (there()) return true;
  PeerControl* const own = control_of(link, link.rank);
  const uint64_t begin = ptx::global_timer();
  while (!there()) {
    if (is_stopped(link)) {
      ptx::store_volatile(&link.host->stopped, 1);
      return false;
    }
    if (ptx::global_timer() - begin > link.timeout_ns) {
      ptx::store_volatile(&link.host->late, static_cast<uint32_t>(rank) + 1);
      ptx::store_volatile(&own->stop, 1);
      return false;
    }
    __nanosleep(kPauseNs);
  }
  return true;
}

}  // namespace nvfp4_moe::cuda
