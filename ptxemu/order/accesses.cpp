// Compares an access with earlier ones: which are ordered before it, and which are not.
#include <algorithm>
#include <cstring>

#include "order/state.h"

namespace ptxemu {
namespace ordering {

Checker checker;

OwnAgent& agent_of(Thread* T, SlotKind kind) {
  OrderThread& o = *T->order;
  for (OwnAgent& agent : o.agents)
    if (agent.kind == kind) return agent;
  const bool of_warp = kind == SlotKind::kProducts || kind == SlotKind::kTensorLoad ||
                       kind == SlotKind::kTensorStore;
  o.agents.push_back({kind, o.cta->agent(kind, of_warp ? T->warp->index : T->linear), 1, {}});
  return o.agents.back();
}

Mbarrier* known_mbarrier(const uint64_t* at) {
  const auto found = checker.mbarriers.find(at);
  return found == checker.mbarriers.end() ? nullptr : &found->second;
}

void release_into(Thread* T, Gather& gather) {
  OrderThread& o = *T->order;
  gather.add(o.base);
  gather.set(o.cta->number, o.slot, {o.number, o.fenced, 0});
  for (const OwnAgent& agent : o.agents)
    if (agent.known.done) gather.set(o.cta->number, agent.slot, agent.known);
  ++o.number;
}

ClockRef release(Thread* T) {
  Gather gather;
  release_into(T, gather);
  return gather.take();
}

void acquire(Thread* T, const ClockRef& clock) {
  OrderThread& o = *T->order;
  o.know(join(o.base, clock));
}

Verdict order_of(const OrderThread& o, const Record& before, Proxy now, uint32_t queue) {
  if (before.cta != o.cta->number) {
    const OrderLaunch& launch = *checker.ctas[before.cta]->launch;
    if (&launch != o.cta->launch &&
        (o.base->launches.has(launch.thread, launch.number) ||
         (planted(Fault::clock_ranks) && launch.thread != o.cta->launch->thread)))
      return Verdict::kOrdered;
  }
  Known known{};
  const Proxy proxy = static_cast<Proxy>(before.proxy);
  if (before.cta == o.cta->number) {
    if (before.slot == queue && proxy == Proxy::kTensor) return Verdict::kOrdered;
    if (o.own && before.slot < o.own->size()) known = (*o.own)[before.slot];
    if (before.slot == o.slot) {
      known.done = ~0u, known.async = std::max(known.async, o.fenced);
    } else if (before.collective && before.slot / 32 == o.slot / 32) {
      known.done = known.async = ~0u;
    } else {
      for (const OwnAgent& agent : o.agents)
        if (agent.slot == before.slot) {
          if (proxy == Proxy::kTensor && agent.known.done >= before.number)
            return Verdict::kOrdered;
          known.done = std::max(known.done, agent.known.done);
          known.async = std::max(known.async, agent.known.async);
        }
    }
  } else if (const Part* part = o.base->find(before.cta);
             part && before.slot < part->slots->size()) {
    known = (*part->slots)[before.slot];
  }
  if (proxy == Proxy::kTensor && o.tensor_base) {
    const Part* part = o.tensor_base->find(before.cta);
    if (part && before.slot < part->slots->size() &&
        (*part->slots)[before.slot].tensor >= before.number)
      return Verdict::kOrdered;
  }
  if (known.done < before.number || before.in_flight) return Verdict::kUnordered;
  if (proxy == Proxy::kTensor) {
    if (!checker.tensor_fences) return Verdict::kOrdered;
    if (planted(Fault::clock_before)) known.tensor = ~0u;
    if (known.tensor < before.number) return Verdict::kNoFenceBefore;
    return planted(Fault::clock_after) || planted(Fault::clock_before) ? Verdict::kOrdered
                                                                       : Verdict::kNoFenceAfter;
  }
  if (now == Proxy::kAsync && proxy == Proxy::kGeneric && before.write &&
      known.async < before.number)
    return Verdict::kNoProxyFence;
  return Verdict::kOrdered;
}

namespace {

bool includes(uint32_t scope, const Record& a, const Record& b) {
  if (a.cta == b.cta || planted(Fault::clock_scope)) return true;
  if (scope == static_cast<uint32_t>(Scope::kSys)) return true;
  if (scope == static_cast<uint32_t>(Scope::kGpu))
    return checker.ctas[a.cta]->launch->thread == checker.ctas[b.cta]->launch->thread;
  return scope == static_cast<uint32_t>(Scope::kCluster) &&
         checker.ctas[a.cta]->cluster == checker.ctas[b.cta]->cluster;
}

// Atomic operations do not race with each other if each one's scope includes the other's thread.
bool both_strong(const Record& a, const Record& b) {
  return a.strong && b.strong && includes(a.scope, a, b) && includes(b.scope, a, b);
}

Verdict verdict_of(Thread* T, const Record& before, const Record& now, uint32_t queue) {
  const Proxy proxy = static_cast<Proxy>(now.proxy);
  Verdict verdict = order_of(*T->order, before, proxy, queue);
  if (verdict == Verdict::kOrdered || !(now.collective || now.any_lane)) return verdict;
  // For an instruction of the whole warp, the knowledge of any lane is enough.
  for (Thread* lane : T->warp->lanes)
    if (lane && lane != T && order_of(*lane->order, before, proxy, queue) == Verdict::kOrdered)
      return Verdict::kOrdered;
  return verdict;
}

void compare(Thread* T, const Record& before, const Record& now, uint64_t at, uint32_t queue) {
  if (before.number == 0 || both_strong(before, now)) return;
  const Verdict verdict = verdict_of(T, before, now, queue);
  if (verdict != Verdict::kOrdered) report(T, verdict, before, now, at);
}

// A read stays until a later one is ordered after it, since a write after that one is then after
// both.
void add_read(Thread* T, Cell& cell, const Record& now) {
  if (planted(Fault::clock_reads)) return;
  const auto replaces = [&](const Record& old) {
    return old.number == 0 || old.same_actor(now) || planted(Fault::clock_read_alone) ||
           order_of(*T->order, old, Proxy::kGeneric, kNoQueue) == Verdict::kOrdered;
  };
  if (replaces(cell.read)) {
    cell.read = now;
    return;
  }
  if (!cell.reads) cell.reads = std::make_unique<std::vector<Record>>();
  auto& reads = *cell.reads;
  for (Record& old : reads)
    if (old.same_actor(now)) {
      old = now;
      return;
    }
  if (reads.size() >= 8 && (reads.size() & (reads.size() - 1)) == 0)
    reads.erase(std::remove_if(reads.begin(), reads.end(), replaces), reads.end());
  reads.push_back(now);
}

// Atomic operations keep the store before them: those of other threads must be ordered after it.
void set_write(Cell& cell, const Record& now) {
  (now.strong ? cell.update : cell.write) = now;
  if (!now.strong) cell.update.number = 0;
  if (planted(Fault::clock_atomic)) cell.write = now;
  cell.read.number = 0;
  cell.reads.reset();
}

}  // namespace

Record stamp(const Thread* T, bool write, Proxy proxy, uint32_t cta, uint32_t slot,
             uint32_t number) {
  Record record;
  record.number = number, record.cta = cta, record.slot = static_cast<uint16_t>(slot);
  record.line = T->line;
  record.proxy = static_cast<uint8_t>(proxy), record.write = write;
  return record;
}
Record stamp(const Thread* T, bool write, Proxy proxy) {
  return stamp(T, write, proxy, T->order->cta->number, T->order->slot, T->order->number);
}

void touch(Thread* T, const void* at, uint64_t size, const Record& now, bool coherent,
           uint32_t queue) {
  if (planted(Fault::clock_granule)) {
    size += reinterpret_cast<uint64_t>(at) % 4;
    at = reinterpret_cast<const void*>(reinterpret_cast<uint64_t>(at) & ~3ull),
    size = (size + 3) / 4 * 4;
  }
  checker.shadow.each(reinterpret_cast<uint64_t>(at), size, [&](Cell& cell, uint64_t address) {
    compare(T, cell.write, now, address, queue);
    compare(T, cell.update, now, address, queue);
    if (!now.write) {
      if (!coherent && !planted(Fault::clock_coherent) && cell.write.number &&
          checker.ctas[cell.write.cta]->launch == checker.ctas[now.cta]->launch)
        report(T, Verdict::kNotCoherent, cell.write, now, address);
      return add_read(T, cell, now);
    }
    compare(T, cell.read, now, address, queue);
    if (cell.reads)
      for (const Record& read : *cell.reads) compare(T, read, now, address, queue);
    if (cell.update.number && !now.strong) checker.released.erase(address);
    set_write(cell, now);
  });
}

void note(const void* at, uint64_t size, const Record& now) {
  checker.shadow.each(reinterpret_cast<uint64_t>(at), size, [&](Cell& cell, uint64_t) {
    if (now.write) return set_write(cell, now);
    // The record of the issue, which may be any of the reads.
    if (cell.read.same_actor(now)) cell.read = now;
    if (cell.reads)
      for (Record& read : *cell.reads)
        if (read.same_actor(now)) read = now;
  });
}

}  // namespace ordering

using namespace ordering;

void OrderThread::know(const ClockRef& clock) {
  base = clock;
  const Part* part = base->find(cta->number);
  own = part ? part->slots.get() : nullptr;
}

uint32_t OrderCta::agent(SlotKind kind, uint32_t index) {
  const auto [at, fresh] = agents.try_emplace({kind, index}, static_cast<uint32_t>(slots.size()));
  if (fresh) slots.push_back({kind, index});
  return at->second;
}

void check_read(Thread* T, const uint8_t* at, uint32_t size, bool coherent) {
  if (!T->order || is_local(T, at)) return;
  touch(T, at, size, stamp(T, false, Proxy::kGeneric), coherent);
}
void check_write(Thread* T, const uint8_t* at, uint32_t size) {
  if (!T->order || is_local(T, at)) return;
  touch(T, at, size, stamp(T, true, Proxy::kGeneric));
}
void check_before_store(Thread* T, const uint8_t* at, uint32_t size) {
  if (T->order) std::memcpy(T->order->stored_over, at, size);
}
void check_after_store(Thread* T, const uint8_t* at, uint32_t size) {
  if (T->order && std::memcmp(T->order->stored_over, at, size) != 0) check_write(T, at, size);
}
void check_collective(Thread* T, const uint8_t* at, uint32_t size, bool write) {
  Record now = stamp(T, write, Proxy::kGeneric);
  now.collective = true;
  touch(T, at, size, now);
}

}  // namespace ptxemu
