// Barriers of warps, ctas and clusters, mbarriers, and launches: the knowledge that arriving
// threads pass to waiting ones.
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
  std::fprintf(stderr, "ptxemu: PTXEMU_CHECK: expected order or order,no-tcgen05-fence, got %s\n",
               asked);
  std::abort();
}

void check_enqueue(Launch& launch) {
  if (!launch.checked) return;
  auto& threads = checker.threads;
  const auto self = std::find_if(threads.begin(), threads.end(), [](const HostThread& one) {
    return one.id == std::this_thread::get_id();
  });
  const uint32_t thread = static_cast<uint32_t>(self - threads.begin());
  if (self == threads.end()) threads.push_back({std::this_thread::get_id(), 0, 0, {}});
  auto order = std::make_unique<OrderLaunch>();
  order->kernel = launch.kernel, order->thread = thread, order->number = ++threads[thread].enqueued;
  // Communication between host threads is not visible, so everything that has ended counts as
  // known.
  for (uint32_t i = 0; i < threads.size(); ++i)
    if (i != thread) order->ended.add(i, threads[i].ended, 0);
  launch.order = order.get();
  checker.launches.push_back(std::move(order));
  ++checker.open;
}

void check_begin_chain(std::vector<Launch>& chain) {
  uint32_t index = 0;
  for (Launch& launch : chain)
    if (launch.order)
      launch.order->index = index++,
      launch.order->before = checker.threads[launch.order->thread].ended;
}

namespace {

// The knowledge of launches that have ended, and of what other host threads' launches have
// released.
void add_foreign(Gather& gather, const ClockRef& clock, uint32_t thread) {
  if (!clock) return;
  gather.add(clock->launches);
  if (checker.threads.size() == 1) return;
  for (const Part& part : clock->parts) {
    const OrderLaunch& launch = *checker.ctas[part.cta]->launch;
    if (launch.thread != thread && !clock->launches.has(launch.thread, launch.number))
      gather.add(part);
  }
}

}  // namespace

void check_end_chain(std::vector<Launch>& chain) {
  for (Launch& launch : chain) {
    if (!launch.order) continue;
    OrderLaunch& order = *launch.order;
    HostThread& thread = checker.threads[order.thread];
    Gather known;
    known.add(thread.known);
    add_foreign(known, order.passed ? order.passed : order.ended_with.take(), order.thread);
    if (!planted(Fault::clock_told)) thread.known = known.take();
    thread.ended = order.number;
    launch.order = nullptr;
    --checker.open;
  }
  if (checker.open == 0) check_give_up();
}

void check_give_up() {
  if (checker.launches.empty()) return;
  checker.open = 0;
  checker.launches.clear();
  checker.threads.clear();
  checker.shadow.clear();
  checker.mbarriers.clear();
  checker.released.clear();
  checker.ctas.clear();
  clear_clocks();
}

void check_freed(uint64_t low, uint64_t bytes) {
  if (checker.launches.empty()) return;
  checker.shadow.forget(low, (bytes + 15) / 16 * 16);
  checker.released.erase(checker.released.lower_bound(low),
                         checker.released.lower_bound(low + bytes));
}

void check_begin_cluster(Cluster& cluster) {
  Launch& launch = *cluster.launch;
  if (!launch.order) return;
  cluster.order = new OrderCluster{++checker.clusters, {}, {}};
  const OrderLaunch& own = *launch.order;
  Gather known;
  known.add(checker.threads[own.thread].known);
  known.add(own.ended);
  Launches earlier;
  earlier.add(own.thread, own.before, 0);
  // The triggers of its predecessor do not cover that launch's own writes.
  if (const Launch* before = launch.predecessor;
      before && before->order && !planted(Fault::clock_trigger)) {
    OrderLaunch& order = *before->order;
    if (!order.triggered) order.triggered = order.triggered_with.take();
    known.add(order.triggered);
    if (planted(Fault::clock_launch)) earlier.add(own.thread, own.before, 1u << order.index);
  }
  known.add(earlier);
  const ClockRef start = known.take();
  for (auto& cta : cluster.ctas) {
    auto order = std::make_unique<OrderCta>();
    order->number = static_cast<uint32_t>(checker.ctas.size());
    order->cluster = cluster.order->number, order->launch = launch.order;
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
    checker.shadow.forget(reinterpret_cast<uint64_t>(cta->shared),
                          (cta->shared_bytes + 15) / 16 * 16);
    checker.mbarriers.erase(checker.mbarriers.lower_bound(low),
                            checker.mbarriers.lower_bound(low + (cta->shared_bytes + 7) / 8));
    if (cta->tensor.cells)
      checker.shadow.forget(reinterpret_cast<uint64_t>(cta->tensor.cells.get()),
                            kTensorLanes * kTensorColumns * 4);
    checker.released.erase(
        checker.released.lower_bound(reinterpret_cast<uint64_t>(cta->shared)),
        checker.released.lower_bound(reinterpret_cast<uint64_t>(cta->shared) + cta->shared_bytes));
    for (Thread& thread : cta->threads) delete thread.order;
    cta->order->shared = cta->order->tensor = nullptr;
    cta->order->agents.clear();
  }
  delete cluster.order;
}

void check_trigger(Thread* T) {
  if (!T->order) return;
  OrderLaunch& launch = *T->cta->cluster->launch->order;
  add_foreign(launch.triggered_with, T->order->base, launch.thread);
}
void check_end_thread(Thread* T) {
  if (!T->order) return;
  OrderLaunch& launch = *T->cta->cluster->launch->order;
  add_foreign(launch.ended_with, T->order->base, launch.thread);
}

// The launch before has ended, and so have those that it has waited for.
void check_prerequisites(Thread* T) {
  if (!T->order) return;
  const Launch* before = T->cta->cluster->launch->predecessor;
  if (!before || !before->order) return;
  OrderLaunch& launch = *before->order;
  if (!launch.passed) {
    Launches ended;
    ended.add(launch.thread, launch.before, 1u << launch.index);
    launch.ended_with.add(ended);
    launch.passed = launch.ended_with.take();
  }
  acquire(T, launch.passed);
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
  if (T->order && (release || planted(Fault::clock_cluster)))
    release_into(T, T->cta->cluster->order->arrived);
}
void check_cluster_open(Cluster* cluster) {
  if (cluster->order) cluster->order->passed = cluster->order->arrived.take();
}
void check_cluster_pass(Thread* T) {
  if (T->order) acquire(T, T->cta->cluster->order->passed);
}

// ---- mbarriers

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
  if (barrier && acquired && barrier->completed && !planted(Fault::clock_phase))
    acquire(T, barrier->completed);
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
