// The checker's state of launches, ctas, threads and barriers, and the comparison of an access with
// earlier ones.
#pragma once

#include <map>
#include <set>
#include <string>
#include <thread>

#include "order/clock.h"
#include "order/hooks.h"
#include "order/shadow.h"

namespace ptxemu {

enum class Proxy : uint8_t { kGeneric, kAsync, kTensor };

// The first slots of a cta are its threads. The others are agents of a thread, a warp, or an
// mbarrier.
enum class SlotKind : uint8_t {
  kThread,
  kCopyAsync,   // a thread's cp.async
  kBulkRead,    // what a thread's bulk stores read
  kBulkWrite,   // what they write
  kProducts,    // a warp's wgmma
  kQueue,       // a thread's tcgen05.mma and tcgen05.cp
  kTensorLoad,  // a warp's tcgen05.ld
  kTensorStore,
  kMbarrier,  // copies that complete at it; its numbers are its phases
};
struct Slot {
  SlotKind kind;
  uint32_t index;  // of the thread or warp in its cta; of an mbarrier the offset in shared memory
};

// An agent of a thread or of its warp, from this thread's view.
struct OwnAgent {
  SlotKind kind;
  uint32_t slot, number;  // of what is issued now
  ordering::Known known;
};

struct OrderCta {
  uint32_t number, cluster;
  const OrderLaunch* launch;
  uint32_t ctaid[3], block[3];
  std::vector<Slot> slots;
  std::map<std::pair<SlotKind, uint32_t>, uint32_t> agents;
  ordering::Gather barriers[16];
  const uint8_t *shared = nullptr, *tensor = nullptr;  // while the cta lives
  uint32_t shared_bytes = 0;
  uint32_t agent(SlotKind kind, uint32_t index);
};

struct OrderThread {
  OrderCta* cta;
  uint32_t slot, number = 1, fenced = 0;  // fenced: the number of the last proxy fence
  ordering::ClockRef base;                // what it knows of others
  ordering::Gather tensor_seen;    // from relaxed waits; counts only for tcgen05, after its fence
  ordering::ClockRef tensor_base;  // the same at its last tcgen05.fence::after_thread_sync
  const ordering::Slots* own = nullptr;  // of base, its own cta's
  std::vector<OwnAgent> agents;
  ordering::ClockRef fences[4];  // what its fences release, by the scope that suffices
  ordering::Gather
      unacquired[4];  // what its relaxed reads have seen, by the scope that a fence needs
  bool wgmma_fenced = false;
  uint8_t stored_over[64];             // what a store replaces
  std::vector<const uint64_t*> inits;  // mbarriers without a fence since
  void know(const ordering::ClockRef& clock);
};

struct OrderCluster {
  uint32_t number;
  ordering::Gather arrived;
  ordering::ClockRef passed;
};

// A launch: its threads' knowledge of earlier launches, and of what other host threads' launches
// have released, as far as its successor may rely on it.
struct OrderLaunch {
  const KernelInfo* kernel;
  uint32_t thread, number;         // the host thread, and among its launches
  uint32_t index = 0, before = 0;  // in its chain; the number before the chain's first
  ordering::Launches ended;        // of other host threads, when it was enqueued
  ordering::Gather ended_with, triggered_with;
  ordering::ClockRef triggered, passed;  // the same, once its successor has asked
};

namespace ordering {

// The combined knowledge of a host thread's finished launches, including the launches themselves by
// number.
struct HostThread {
  std::thread::id id;
  uint32_t enqueued = 0, ended = 0;
  ClockRef known;
};

struct Mbarrier {
  OrderCta* cta;
  uint32_t slot, phases = 0;  // that have ended
  Record init;
  bool fenced = false;
  Gather arrived;
  ClockRef completed;
};

// A release at an address, and its scope.
struct Released {
  Scope scope;
  uint32_t cta, cluster, thread;
  ClockRef clock;
};

enum class Verdict : uint8_t {
  kOrdered,
  kUnordered,
  kNoProxyFence,
  kNoFenceBefore,
  kNoFenceAfter,
  kNotCoherent,
  kNoInitFence
};

// Kept from the first launch that is enqueued until none is left.
struct Checker {
  Shadow shadow;
  std::vector<std::unique_ptr<OrderCta>> ctas;
  std::vector<std::unique_ptr<OrderLaunch>> launches;
  std::vector<HostThread> threads;
  size_t open = 0;  // launches that have not ended
  std::map<const uint64_t*, Mbarrier> mbarriers;
  std::map<uint64_t, std::vector<Released>> released;
  uint32_t clusters = 0;
  bool tensor_fences = true;  // whether tcgen05.fence is required
  std::set<std::string> known_findings;
  uint64_t findings = 0;
  std::string text;  // of those that are printed
};
extern Checker checker;

OwnAgent& agent_of(Thread* T, SlotKind kind);
Mbarrier* known_mbarrier(
    const uint64_t* at);  // null for one that no launch under the checker has initialized
// Memory that holds registers is private to its thread.
inline bool is_local(const Thread* T, const uint8_t* at) {
  const uint64_t address = reinterpret_cast<uint64_t>(at);
  return address >= T->local_low && address < T->local_high;
}
// Everything that T has done and knows so far.
ClockRef release(Thread* T);
void release_into(Thread* T, Gather& gather);
void acquire(Thread* T, const ClockRef& clock);

// The order between an earlier access and one that T makes now, or makes by a queue's slot, which
// is in order itself.
constexpr uint32_t kNoQueue = ~0u;
Verdict order_of(const OrderThread& o, const Record& before, Proxy now, uint32_t queue);
// A record of T's own slot, or of an agent's, at T's PTX line.
Record stamp(const Thread* T, bool write, Proxy proxy);
Record stamp(const Thread* T, bool write, Proxy proxy, uint32_t cta, uint32_t slot,
             uint32_t number);
// Compares an access with earlier ones and notes it.
void touch(Thread* T, const void* at, uint64_t size, const Record& now, bool coherent = true,
           uint32_t queue = kNoQueue);
// Only records an access that was compared when it was issued.
void note(const void* at, uint64_t size, const Record& now);

void report(Thread* T, Verdict verdict, const Record& before, const Record& now, uint64_t at);
// A wgmma after registers were written at `line`, 0 if the thread has had no fence at all.
void report_unfenced(Thread* T, uint32_t line);
void report_mbarrier(Thread* T, Verdict verdict, const Mbarrier& barrier, const uint64_t* at,
                     bool async);

}  // namespace ordering
}  // namespace ptxemu
