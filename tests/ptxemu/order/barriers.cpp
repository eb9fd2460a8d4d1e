// Barriers of warps, ctas and clusters, mbarriers, launches: what those that arrive pass on to those that wait.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "order/state.h"
#include "runtime/control.h"

namespace ptxemu {

using namespace ordering;

// ---- launches, clusters, threads

bool asked_to_check() {
  const char* asked = std::getenv("PTXEMU_CHECK");
  if (!asked || !*asked) return false;
  checker.tensor_fences = std::strcmp(asked, "order,no-tcgen05-fence") != 0;
  if (std::strcmp(asked, "order") == 0 || !checker.tensor_fences) return true;
  std::fprintf(stderr, "ptxemu: PTXEMU_CHECK: expected order or order,no-tcgen05-fence, got %s\n", asked);
  std::abort();
}

void check_begin_chain(std::vector<Launch>& chain) {
  checker.launches.clear();
  if (chain.empty() || !chain[0].checked) return;
  for (Launch& launch : chain) {
    launch.order = new OrderLaunch{static_cast<uint32_t>(checker.launches.size())};
    checker.launches.push_back(&launch);
  }
}

void check_end_chain(std::vector<Launch>&) {
  if (checker.launches.empty()) return;
  for (Launch* launch : checker.launches) delete launch->order, launch->order = nullptr;
  checker.launches.clear();
  checker.shadow.clear();
  checker.mbarriers.clear();
  checker.released.clear();
  checker.ctas.clear();
  clear_clocks();
}

void check_begin_cluster(Cluster& cluster) {
  Launch& launch = *cluster.launch;
  if (!launch.order) return;
  cluster.order = new OrderCluster{++checker.clusters, {}, {}};
  auto start = std::make_shared<Clock>();
  // Its predecessor's triggers say nothing of that launch's own writes.
  if (const Launch* before = launch.predecessor; before && before->order && !planted(Fault::clock_trigger))
    start->launches = before->order->triggered_with | (planted(Fault::clock_launch) ? 1u << before->order->index : 0);
  for (auto& cta : cluster.ctas) {
    auto order = std::make_unique<OrderCta>();
    order->number = static_cast<uint32_t>(checker.ctas.size());
    order->cluster = cluster.order->number, order->launch = launch.order->index;
    std::copy(cta->ctaid, cta->ctaid + 3, order->ctaid);
    std::copy(cta->ntid, cta->ntid + 3, order->block);
    order->shared = cta->shared, order->shared_bytes = cta->shared_bytes;
    for (uint32_t i = 0; i < cta->thread_count; ++i) order->slots.push_back({SlotKind::kThread, i});
    for (Thread& thread : cta->threads) {
      thread.order = new OrderThread;
      thread.order->cta = order.get(), thread.order->slot = thread.linear;
      thread.order->know(start);
    }
    cta->order = order.get();
    checker.ctas.push_back(std::move(order));
  }
}

void check_end_cluster(Cluster& cluster) {
  if (!cluster.order) return;
  for (auto& cta : cluster.ctas) {
    const auto low = reinterpret_cast<const uint64_t*>(cta->shared);
    checker.shadow.forget(reinterpret_cast<uint64_t>(cta->shared), (cta->shared_bytes + 15) / 16 * 16);
    checker.mbarriers.erase(checker.mbarriers.lower_bound(low),
                            checker.mbarriers.lower_bound(low + (cta->shared_bytes + 7) / 8));
    if (cta->tensor.cells)
      checker.shadow.forget(reinterpret_cast<uint64_t>(cta->tensor.cells.get()), kTensorLanes * kTensorColumns * 4);
    checker.released.erase(checker.released.lower_bound(reinterpret_cast<uint64_t>(cta->shared)),
                           checker.released.lower_bound(reinterpret_cast<uint64_t>(cta->shared) + cta->shared_bytes));
    for (Thread& thread : cta->threads) delete thread.order;
    cta->order->shared = cta->order->tensor = nullptr;
    cta->order->agents.clear();
  }
  delete cluster.order;
}

void check_trigger(Thread* T) {
  if (T->order) T->cta->cluster->launch->order->triggered_with |= T->order->base->launches;
}
void check_end_thread(Thread* T) {
  if (T->order) T->cta->cluster->launch->order->ended_with |= T->order->base->launches;
}

// The launch before has ended, and so have those that it has waited for.
void check_prerequisites(Thread* T) {
  if (!T->order) return;
  const Launch* before = T->cta->cluster->launch->predecessor;
  if (!before || !before->order) return;
  OrderThread& o = *T->order;
  o.know(with_launches(o.base, 1u << before->order->index | before->order->ended_with));
}

// ---- barriers

void check_warp_sync(Thread* T, uint32_t mask) {
  if (!T->order || planted(Fault::clock_warp)) return;
  Gather all;
  for (Thread* lane : T->warp->lanes)
    if (lane && mask >> lane->lane & 1) release_into(lane, all);
  const ClockRef clock = all.take();
  for (Thread* lane : T->warp->lanes)
    if (lane && mask >> lane->lane & 1) acquire(lane, clock);
}

void check_arrive(Thread* T, uint32_t barrier) {
  if (T->order && !planted(Fault::clock_arrive)) release_into(T, T->cta->order->barriers[barrier]);
}
void check_open(Cta* cta, uint32_t barrier, const std::vector<Thread*>& waiting, Thread* last) {
  if (!cta->order) return;
  const ClockRef clock = cta->order->barriers[barrier].take();
  for (Thread* thread : waiting) acquire(thread, clock);
  if (last) acquire(last, clock);
}

void check_cluster_arrive(Thread* T, bool release) {
  if (T->order && (release || planted(Fault::clock_cluster))) release_into(T, T->cta->cluster->order->arrived);
}
void check_cluster_open(Cluster* cluster) {
  if (cluster->order) cluster->order->passed = cluster->order->arrived.take();
}
void check_cluster_pass(Thread* T) {
  if (T->order) acquire(T, T->cta->cluster->order->passed);
}

// ---- mbarriers

namespace {

Mbarrier* known_mbarrier(const uint64_t* at) {
  const auto found = checker.mbarriers.find(at);
  return found == checker.mbarriers.end() ? nullptr : &found->second;
}

}  // namespace

// Phases are counted on, so that no earlier one is taken for one of the new barrier.
void check_mbarrier_init(Thread* T, const uint64_t* at) {
  if (!T->order) return;
  const uint8_t* low = reinterpret_cast<const uint8_t*>(at);
  OrderCta* home = nullptr;
  for (auto& cta : T->cta->cluster->ctas)
    if (low >= cta->shared && low < cta->shared + cta->shared_bytes) home = cta->order;
  if (!home) return;
  Mbarrier& barrier = checker.mbarriers[at];
  barrier.cta = home;
  barrier.slot = home->agent(SlotKind::kMbarrier, static_cast<uint32_t>(low - home->shared));
  barrier.init = stamp(T, true, Proxy::kGeneric);
  barrier.fenced = false;
  barrier.arrived = {};
  barrier.completed = nullptr;
  T->order->inits.push_back(at);
}

namespace {

Mbarrier* use(Thread* T, const uint64_t* at) {
  Mbarrier* barrier = T->order ? known_mbarrier(at) : nullptr;
  if (barrier && order_of(*T->order, barrier->init, Proxy::kGeneric, kNoQueue) != Verdict::kOrdered)
    report_mbarrier(T, Verdict::kUnordered, *barrier, at, false);
  return barrier;
}

// A thread's own tcgen05 work is done for it once it has seen the phase that its commit completes.
void know_own_queue(OrderThread& o, const Clock& completed) {
  const Part* part = completed.find(o.cta->number);
  for (OwnAgent& agent : o.agents)
    if (agent.kind == SlotKind::kQueue && part && agent.slot < part->slots->size())
      agent.known.done = std::max(agent.known.done, (*part->slots)[agent.slot].done);
}

}  // namespace

void check_mbarrier_arrive(Thread* T, const uint64_t* at, bool release) {
  Mbarrier* barrier = use(T, at);
  if (!barrier) return;
  if (release) return release_into(T, barrier->arrived);
  // tcgen05 work that a fence has put before the arrival needs no release.
  for (const OwnAgent& agent : T->order->agents)
    if (const uint32_t number = agent.known.tensor)
      barrier->arrived.set(T->order->cta->number, agent.slot, {number, 0, number});
}
void check_mbarrier_pass(Thread* T, const uint64_t* at, bool over, bool acquired) {
  Mbarrier* barrier = use(T, at);
  if (barrier && over && barrier->completed) know_own_queue(*T->order, *barrier->completed);
  if (barrier && over && !acquired) T->order->tensor_seen.add(barrier->completed);
  if (barrier && acquired && barrier->completed && !planted(Fault::clock_phase)) acquire(T, barrier->completed);
}
void check_mbarrier_phase(const uint64_t* at) {
  Mbarrier* barrier = known_mbarrier(at);
  if (!barrier) return;
  const uint32_t phase = ++barrier->phases;
  barrier->arrived.add(barrier->completed);
  barrier->arrived.set(barrier->cta->number, barrier->slot, {phase, phase, phase});
  barrier->completed = barrier->arrived.take();
}

}  // namespace ptxemu
