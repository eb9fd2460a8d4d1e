// Barriers of a cta (16, by number) and of a cluster.
#include "runtime/control.h"

namespace ptxemu {
namespace {

// Releases all waiting threads once enough have arrived; without a count, all live threads must
// arrive.
void open_if_full(Cta* cta, uint32_t id, Thread* last) {
  NamedBarrier& barrier = cta->barriers[id];
  const uint32_t wanted = barrier.expected ? barrier.expected : cta->alive;
  if (barrier.count == 0 || barrier.count < wanted) return;
  note_progress();
  if (barrier.reductions && barrier.reductions != barrier.count) barrier.trues = 0;
  barrier.result = barrier.trues;
  barrier.count = barrier.expected = barrier.trues = barrier.reductions = 0;
  check_open(cta, id, barrier.waiting, last);
  for (Thread* thread : barrier.waiting) wake(thread);
  barrier.waiting.clear();
}

void arrive(Thread* T, uint32_t id, uint32_t count, bool wait) {
  if (id > 15) fault(T, "a barrier's number: expected 0 to 15");
  if (count % 32) fault(T, "a barrier's count of threads: expected a multiple of 32");
  NamedBarrier& barrier = T->cta->barriers[id];
  if (barrier.count && barrier.expected != count)
    fault(T, "threads disagree about how many a barrier is for");
  barrier.expected = count;
  check_arrive(T, id);
  if (++barrier.count > (count ? count : T->cta->alive))
    fault(T, "more threads arrive at a barrier than it is for");
  if (barrier.count == (count ? count : T->cta->alive))
    open_if_full(T->cta, id, wait ? T : nullptr);
  else if (wait && !(planted(Fault::barrier_early) && T->warp->index == 0)) {
    barrier.waiting.push_back(T);
    park(T, "barrier", id);
  }
}

void open_cluster_if_full(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->alive) return;
  note_progress();
  cluster->arrived = 0;
  ++cluster->phase;
  check_cluster_open(cluster);
  for (Thread* thread : cluster->cluster_waiting) wake(thread);
  cluster->cluster_waiting.clear();
}

}  // namespace

void barrier_sync(Thread* T, uint32_t id, uint32_t count) { arrive(T, id, count, true); }
void barrier_arrive(Thread* T, uint32_t id, uint32_t count) { arrive(T, id, count, false); }

uint32_t barrier_reduce(Thread* T, uint32_t id, uint32_t count, bool predicate,
                        BarrierReduction kind) {
  if (id > 15) fault(T, "a barrier's number: expected 0 to 15");
  NamedBarrier& barrier = T->cta->barriers[id];
  barrier.trues = planted(Fault::barrier_red_or) ? predicate : barrier.trues + predicate;
  const uint32_t participants = count ? count : T->cta->alive;
  arrive(T, id, count, true);
  const uint32_t trues = T->cta->barriers[id].result;
  return kind == BarrierReduction::kPopc  ? trues
         : kind == BarrierReduction::kAnd ? trues == participants
                                          : trues > 0;
}

void cluster_arrive(Thread* T, bool release) {
  Cluster* cluster = T->cta->cluster;
  if (T->cluster_arrived) fault(T, "barrier.cluster.arrive twice without a wait");
  T->cluster_arrived = true;
  T->cluster_phase = cluster->phase;
  ++cluster->arrived;
  check_cluster_arrive(T, release);
  open_cluster_if_full(cluster);
}

void cluster_wait(Thread* T) {
  Cluster* cluster = T->cta->cluster;
  if (!T->cluster_arrived) fault(T, "barrier.cluster.wait without an arrive");
  T->cluster_arrived = false;
  if (cluster->phase == T->cluster_phase) {
    cluster->cluster_waiting.push_back(T);
    park(T, "the cluster's barrier", 0);
  }
  check_cluster_pass(T);
}

// Barriers no longer wait for a thread that has ended, and its warp's registers are free.
void leave_barriers(Thread* T) {
  for (uint32_t id = 0; id < 16; ++id)
    if (!T->cta->barriers[id].expected) open_if_full(T->cta, id, nullptr);
  // It may have arrived at the cluster's barrier without a wait: `arrived` counts living threads.
  Cluster* cluster = T->cta->cluster;
  if (T->cluster_arrived && T->cluster_phase == cluster->phase && !planted(Fault::cluster_ended))
    --cluster->arrived;
  open_cluster_if_full(cluster);
  if (!T->warp->alive) wake_for_registers(T->cta);
}

}  // namespace ptxemu
