// Starting and ending clusters: ctas with their memory, threads with their coordinates.
#include <cstdlib>
#include <cstring>

#include "runtime/processor.h"

namespace ptxemu {
namespace {

void place_thread(Thread& thread, Cta& cta, uint32_t linear, const Launch& launch) {
  thread.cta = &cta;
  thread.warp = &cta.warps[linear / 32];
  thread.lane = linear % 32;
  thread.linear = linear;
  thread.rank = cta.rank;
  thread.tid[0] = linear % launch.block[0];
  thread.tid[1] = linear / launch.block[0] % launch.block[1];
  thread.tid[2] = linear / launch.block[0] / launch.block[1];
  thread.params = launch.params;
  thread.shared = cta.shared;
  thread.shared_end = cta.shared_bytes;
  prepare_fiber(thread);
  Warp& warp = *thread.warp;
  warp.cta = &cta;
  warp.index = linear / 32;
  warp.alive |= 1u << thread.lane;
  warp.born |= 1u << thread.lane;
  warp.ready |= 1u << thread.lane;
  warp.lanes[thread.lane] = &thread;
}

std::unique_ptr<Cta> make_cta(Launch& launch, Cluster* cluster, uint64_t index, uint32_t rank) {
  auto cta = std::make_unique<Cta>();
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  uint64_t cluster_index = index, within = rank;
  cta->cluster = cluster;
  for (int axis = 0; axis < 3; ++axis) {
    const uint32_t clusters = launch.grid[axis] / launch.cluster[axis];
    cta->clusterid[axis] = static_cast<uint32_t>(cluster_index % clusters);
    cta->cluster_ctaid[axis] = static_cast<uint32_t>(within % launch.cluster[axis]);
    cluster_index /= clusters;
    within /= launch.cluster[axis];
    cta->nclusterid[axis] = clusters;
    cta->cluster_nctaid[axis] = launch.cluster[axis];
    cta->ctaid[axis] = cta->clusterid[axis] * launch.cluster[axis] + cta->cluster_ctaid[axis];
    cta->nctaid[axis] = launch.grid[axis];
    cta->ntid[axis] = launch.block[axis];
  }
  cta->rank = rank;
  cta->cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  cta->explicit_cluster = launch.explicit_cluster;
  cta->thread_count = cta->alive = cta->untriggered = threads;
  cta->warp_count = (threads + 31) / 32;
  cta->sm_count = launch.resident_clusters;
  cta->sm = static_cast<uint32_t>(index % launch.resident_clusters);
  cta->dynamic_shared_bytes = launch.dynamic_shared_bytes;
  cta->shared_bytes =
      kSharedBase + launch.kernel->static_shared_bytes + launch.dynamic_shared_bytes;
  // Shared memory is aligned to 1 KiB, because swizzled copies and descriptors depend on it.
  cta->shared =
      static_cast<uint8_t*>(std::aligned_alloc(1024, (cta->shared_bytes + 2047) / 1024 * 1024));
  std::memset(cta->shared, kSharedPoison, cta->shared_bytes);
  cta->warps.resize(cta->warp_count);
  cta->threads = std::vector<Thread>(threads);
  for (uint32_t i = 0; i < threads; ++i) place_thread(cta->threads[i], *cta, i, launch);
  return cta;
}

}  // namespace

void start_cluster(Launch& launch) {
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = &launch;
  const uint32_t size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  for (uint32_t rank = 0; rank < size; ++rank)
    cluster->ctas.push_back(make_cta(launch, cluster.get(), launch.next, rank));
  cluster->alive = size * cluster->ctas[0]->thread_count;
  check_begin_cluster(*cluster);
  ++launch.next;
  launch.live.push_back(std::move(cluster));
}

void free_cluster(Cluster& cluster) {
  check_end_cluster(cluster);
  for (auto& cta : cluster.ctas) {
    for (Thread& thread : cta->threads) give_stack(thread.stack);
    std::free(cta->shared);
  }
}

}  // namespace ptxemu
