// mbarrier objects in shared memory: pending arrivals (20 bits), arrivals per phase (20), pending
// bytes (23, biased), phase.
#include "runtime/control.h"

namespace ptxemu {
namespace {

constexpr int32_t kBias = 1 << 22, kMostBytes = (1 << 20) - 1;

struct Barrier {
  uint32_t pending, expected;
  int32_t bytes;
  uint32_t phase;
};

Barrier load(const uint64_t* at) {
  const uint64_t x = *at;
  return {static_cast<uint32_t>(x & 0xfffff), static_cast<uint32_t>(x >> 20 & 0xfffff),
          static_cast<int32_t>(x >> 40 & 0x7fffff) - kBias, static_cast<uint32_t>(x >> 63)};
}
void store(uint64_t* at, const Barrier& b) {
  *at = (b.pending & 0xfffffull) | (b.expected & 0xfffffull) << 20 |
        static_cast<uint64_t>((b.bytes + kBias) & 0x7fffff) << 40 |
        static_cast<uint64_t>(b.phase) << 63;
}

// The phase ends once all arrivals and all bytes are complete.
void update_phase(Cluster* cluster, uint64_t* at, Barrier b) {
  if (b.pending != 0 || (b.bytes != 0 && !planted(Fault::mbarrier_early))) {
    store(at, b);
    return;
  }
  note_progress();
  if (cluster->order) check_mbarrier_phase(at);
  b.phase ^= 1;
  b.pending = b.expected;
  store(at, b);
  const auto waiting = cluster->barrier_waiting.find(at);
  if (waiting == cluster->barrier_waiting.end()) return;
  const auto threads = std::move(waiting->second);
  cluster->barrier_waiting.erase(waiting);
  for (Thread* thread : threads) wake(thread);
}

}  // namespace

uint64_t* mbarrier_at(Thread* T, uint64_t address) {
  return reinterpret_cast<uint64_t*>(T->shared_at(address, 8));
}

void mbarrier_init(Thread* T, uint64_t address, uint32_t count) {
  if (count == 0 || count > 0xfffff) fault(T, "mbarrier.init: expected 1 to 2^20 - 1 arrivals");
  store(mbarrier_at(T, address), {count, count, 0, 0});
  check_mbarrier_init(T, mbarrier_at(T, address));
}
void mbarrier_invalidate(Thread* T, uint64_t address) {
  *mbarrier_at(T, address) = 0xfefefefefefefefeull;
}

void mbarrier_expect(Thread* T, uint64_t address, uint32_t bytes) {
  uint64_t* at = mbarrier_at(T, address);
  Barrier b = load(at);
  b.bytes += static_cast<int32_t>(bytes);
  if (b.bytes > kMostBytes) fault(T, "mbarrier: more than 2^20 - 1 bytes to come");
  store(at, b);
  if (T->order) check_mbarrier_arrive(T, at, false);
}
void mbarrier_complete_bytes(Cluster* cluster, uint64_t* at, uint32_t bytes) {
  Barrier b = load(at);
  if (planted(Fault::mbarrier_bytes_first) && b.bytes < static_cast<int32_t>(bytes)) return;
  b.bytes -= static_cast<int32_t>(bytes);
  if (b.bytes < -kMostBytes)
    fault_work(cluster, "mbarrier: 2^20 bytes more have come than were expected");
  update_phase(cluster, at, b);
}
void mbarrier_complete(Thread* T, uint64_t address, uint32_t bytes) {
  mbarrier_complete_bytes(T->cta->cluster, mbarrier_at(T, address), bytes);
}

uint64_t mbarrier_arrive(Thread* T, uint64_t address, uint32_t count, bool drop, bool release) {
  uint64_t* at = mbarrier_at(T, address);
  const uint64_t state = *at;
  Barrier b = load(at);
  if (b.pending < count) fault(T, "mbarrier: more arrivals than the phase expects");
  if (drop) b.expected -= count;
  b.pending -= count;
  if (T->order) check_mbarrier_arrive(T, at, release);
  update_phase(T->cta->cluster, at, b);
  return state;
}
void mbarrier_arrive_from_work(Cluster* cluster, uint64_t* at) {
  Barrier b = load(at);
  if (b.pending == 0) fault_work(cluster, "mbarrier: more arrivals than the phase expects");
  --b.pending;
  update_phase(cluster, at, b);
}
void add_pending_arrival(Thread* T, uint64_t* at) {
  Barrier b = load(at);
  if (++b.pending > 0xfffff) fault(T, "mbarrier: more than 2^20 - 1 pending arrivals");
  store(at, b);
}

// True once the phase of that parity has ended. A blocking wait may end without success, as the
// definition allows.
bool mbarrier_wait(Thread* T, uint64_t address, uint32_t phase, bool blocking, bool acquire) {
  uint64_t* at = mbarrier_at(T, address);
  if (planted(Fault::mbarrier_parity)) phase ^= 1;
  const auto passed = [=] {
    const bool over = load(at).phase != phase;
    if (T->order) check_mbarrier_pass(T, at, over, over && acquire);
    return over;
  };
  if (load(at).phase != phase) return passed();
  if (!blocking || (order() == Order::kRandom && random_number() % 2)) {
    yield(T);
  } else {
    T->cta->cluster->barrier_waiting[at].push_back(T);
    park(T, phase ? "phase 1 of the mbarrier at" : "phase 0 of the mbarrier at", address);
  }
  return passed();
}

uint32_t mbarrier_pending(uint64_t state) { return static_cast<uint32_t>(state & 0xfffff); }

}  // namespace ptxemu
