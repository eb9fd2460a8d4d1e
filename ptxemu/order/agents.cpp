// Agents that act for threads asynchronously: copies, wgmma, tcgen05. Each agent has its own slot
// and numbers, and threads that wait for it learn what it has done.
#include "order/state.h"

namespace ptxemu {

using namespace ordering;

namespace {

void touch_as(Thread* T, SlotKind kind, const void* at, uint64_t size, bool write, Proxy proxy,
              bool any_lane = false, bool queue = false) {
  const OwnAgent& agent = agent_of(T, kind);
  if (planted(Fault::clock_agents)) agent_of(T, kind).known.done = agent.number;
  Record now = stamp(T, write, proxy, T->order->cta->number, agent.slot, agent.number);
  now.any_lane = any_lane;
  touch(T, at, size, now, true, queue ? agent.slot : kNoQueue);
}

}  // namespace

// ---- cp.async: of the generic proxy, but not in the thread's order

void check_copy_async(Thread* T, const uint8_t* to, const uint8_t* from, uint32_t size,
                      uint32_t source_bytes) {
  if (!T->order) return;
  if (source_bytes) touch_as(T, SlotKind::kCopyAsync, from, source_bytes, false, Proxy::kGeneric);
  touch_as(T, SlotKind::kCopyAsync, to, size, true, Proxy::kGeneric);
}
void check_copy_group(Thread* T) {
  if (T->order) ++agent_of(T, SlotKind::kCopyAsync).number;
}
void check_copy_wait(Thread* T, uint32_t groups_left) {
  if (!T->order) return;
  OwnAgent& agent = agent_of(T, SlotKind::kCopyAsync);
  if (groups_left == kNoneOpen)
    agent.known.done = agent.number++;
  else if (agent.number > groups_left + 1)
    agent.known.done = std::max(agent.known.done, agent.number - 1 - groups_left);
}
// The arrival releases the copies and nothing else.
AgentNumber check_copy_arrive(Thread* T) {
  if (!T->order) return {};
  OwnAgent& agent = agent_of(T, SlotKind::kCopyAsync);
  return {T->order->cta->number, agent.slot, agent.number++};
}
void check_copy_done(Cluster* cluster, AgentNumber copies, const uint64_t* at) {
  Mbarrier* barrier = cluster->order ? known_mbarrier(at) : nullptr;
  if (barrier) barrier->arrived.set(copies.cta, copies.slot, {copies.number, 0, 0});
}

// ---- copies that complete at an mbarrier

void check_bulk(Thread* T, const uint8_t* to, const uint8_t* from, uint32_t size,
                const uint64_t* at) {
  Mbarrier* barrier = T->order ? known_mbarrier(at) : nullptr;
  if (!barrier) return;
  const Verdict verdict = order_of(*T->order, barrier->init, Proxy::kAsync, kNoQueue);
  if (verdict == Verdict::kUnordered ||
      (verdict == Verdict::kNoProxyFence && !barrier->fenced && !planted(Fault::clock_init)))
    report_mbarrier(T, verdict == Verdict::kUnordered ? verdict : Verdict::kNoInitFence, *barrier,
                    at, true);
  Record now =
      stamp(T, false, Proxy::kAsync, barrier->cta->number, barrier->slot, barrier->phases + 1);
  now.in_flight = true;
  if (from) touch(T, from, size, now);
  now.write = true;
  touch(T, to, size, now);
}
void check_bulk_done(Cluster* cluster, const uint8_t* to, const uint8_t* from, uint32_t size,
                     const uint64_t* at, uint32_t line) {
  Mbarrier* barrier = cluster->order ? known_mbarrier(at) : nullptr;
  if (!barrier) return;
  Record now;
  now.number = barrier->phases + 1, now.cta = barrier->cta->number,
  now.slot = static_cast<uint16_t>(barrier->slot);
  now.line = line, now.proxy = static_cast<uint8_t>(Proxy::kAsync);
  if (from) note(from, size, now);
  now.write = true;
  note(to, size, now);
}

void check_bulk_source(Thread* T, const uint8_t* at, uint32_t size) {
  if (T->order) touch(T, at, size, stamp(T, false, Proxy::kAsync));
}

// ---- bulk stores, in groups

void check_bulk_store(Thread* T, const uint8_t* at, uint32_t size, bool write) {
  if (T->order)
    touch_as(T, write ? SlotKind::kBulkWrite : SlotKind::kBulkRead, at, size, write, Proxy::kAsync);
}
void check_bulk_group(Thread* T) {
  if (!T->order) return;
  ++agent_of(T, SlotKind::kBulkRead).number;
  ++agent_of(T, SlotKind::kBulkWrite).number;
}
void check_bulk_wait(Thread* T, uint32_t groups_left, bool reads_alone) {
  if (!T->order) return;
  for (SlotKind kind : {SlotKind::kBulkRead, SlotKind::kBulkWrite}) {
    OwnAgent& agent = agent_of(T, kind);
    if (agent.number > groups_left + 1 && !(reads_alone && kind == SlotKind::kBulkWrite)) {
      agent.known.done = std::max(agent.known.done, agent.number - 1 - groups_left);
      agent.known.async = agent.known.done;
    }
  }
}

// ---- wgmma

void check_wgmma_read(Thread* T, const uint8_t* at, uint32_t size) {
  if (!T->order) return;
  OwnAgent& agent = agent_of(T, SlotKind::kProducts);
  agent.number = static_cast<uint32_t>(T->wgmma_group) + 1;
  touch_as(T, SlotKind::kProducts, at, size, false, Proxy::kAsync, true);
}
void check_wgmma_wait(Thread* T, uint64_t before_group) {
  if (!T->order) return;
  OwnAgent& agent = agent_of(T, SlotKind::kProducts);
  agent.known.done = std::max(agent.known.done, static_cast<uint32_t>(before_group));
}

void check_wgmma_fence(Thread* T) {
  if (T->order) T->order->wgmma_fenced = true;
}
void check_unfenced(Thread* T, uint32_t line) {
  if (T->order && (line || !T->order->wgmma_fenced)) report_unfenced(T, line);
}

// ---- tcgen05

namespace {

constexpr SlotKind kTensorSlots[] = {SlotKind::kQueue, SlotKind::kTensorLoad,
                                     SlotKind::kTensorStore};

}  // namespace

void check_tensor(Thread* T, TensorAgent agent, const void* at, uint32_t size, bool write) {
  if (!T->order) return;
  for (auto& cta : T->cta->cluster->ctas)
    cta->order->tensor = reinterpret_cast<uint8_t*>(cta->tensor.cells.get());
  const bool queue = agent == TensorAgent::kQueue;
  touch_as(T, kTensorSlots[static_cast<int>(agent)], at, size, write, Proxy::kTensor, !queue,
           queue);
}
void check_tensor_operand(Thread* T, const uint8_t* at, uint32_t size) {
  if (T->order) touch_as(T, SlotKind::kQueue, at, size, false, Proxy::kAsync);
}
void check_tensor_freed(Thread* T, const void* at, uint32_t size) {
  if (!T->order || planted(Fault::clock_dealloc)) return;
  check_tensor(T, TensorAgent::kStore, at, size, true);
  checker.shadow.forget(reinterpret_cast<uint64_t>(at), size);
}
void check_tensor_wait(Thread* T, TensorAgent which) {
  if (!T->order) return;
  OwnAgent& agent = agent_of(T, kTensorSlots[static_cast<int>(which)]);
  agent.known.done = agent.number++;
}
TensorCommit check_tensor_commit(Thread* T) {
  if (!T->order) return {};
  OwnAgent& agent = agent_of(T, SlotKind::kQueue);
  return {{T->order->cta->number, agent.slot, agent.number++}, T->order->base};
}
// A commit includes tcgen05.fence::before_thread_sync. Its work began after everything that its
// thread had waited for, so a thread that waits for the work is also ordered after that: for
// example after the bytes of a stage that it read.
void check_tensor_done(Cluster* cluster, const TensorCommit& commit, const uint64_t* at) {
  Mbarrier* barrier = cluster->order ? known_mbarrier(at) : nullptr;
  if (!barrier) return;
  if (!planted(Fault::clock_commit)) barrier->arrived.add(commit.known);
  barrier->arrived.set(commit.work.cta, commit.work.slot,
                       {commit.work.number, 0, commit.work.number});
}

}  // namespace ptxemu
