// The emulated machine: threads on fibers, warps, ctas with shared and tensor memory, clusters,
// launches.
//
// Translated kernels (PTXEMU_KERNEL) see only plain members, because g++ needs several times as
// long for the standard library's headers as for most kernels. The other members of a structure
// come last, so that kernels and the run time agree about where the plain ones are.
#pragma once

#include <cstdint>
#ifndef PTXEMU_KERNEL
#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>
#endif

#include "runtime/bits.h"
#include "runtime/order.h"

namespace ptxemu {

struct Thread;
struct Cta;
struct Cluster;
struct Launch;
// The checker of order's state of each; null without it (runtime/order.h).
struct OrderThread;
struct OrderCta;
struct OrderCluster;
struct OrderLaunch;

// The description of a translated kernel (translator/program.py writes it).
struct KernelInfo {
  const char* name;
  void (*run)(Thread*);
  uint32_t parameter_bytes, static_shared_bytes;
  uint32_t max_threads[3], cluster[3];  // 0 if the kernel does not specify it
  uint32_t parameter_count;
  uint32_t offsets[64], sizes[64];  // of the parameters, in bytes
  uint32_t instructions;
  bool exact_threads;                   // max_threads is what a launch must have (.reqntid)
  uint32_t max_cluster, max_registers;  // .maxclusterrank, .maxnreg; 0 without
};

// Shared addresses are 32 bits: the cta's rank in the cluster, then an offset. As on hardware the
// first KiB is the system's, so that no variable has address 0. Generic addresses of shared memory
// carry a tag.
constexpr uint32_t kSharedBase = 1024, kSharedOffsetBits = 24;
constexpr uint64_t kSharedTag = 0x7e00000000000000ull;
constexpr uint8_t kSharedPoison = 0xfe;

#ifdef PTXEMU_KERNEL
struct InFlightRegisters;
#else
// Registers that wgmma is still writing: their current owner, and their values once they become
// visible.
struct InFlightRegisters {
  std::vector<uint32_t*> registers;  // may name a slot several times: copies
  std::vector<uint32_t> slots;       // of each register
  std::vector<uint32_t> values;
  uint64_t group = 0;  // the commit group of the last product that writes them
};

// A copy that cp.async has issued: the bytes already read, or the address to read them from as late
// as allowed.
struct PendingCopy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t size, source_bytes;
  bool fetched;
  std::array<uint8_t, 16> bytes;
};
#endif

struct Warp;
struct Thread {
  Cta* cta;
  Warp* warp;
  uint32_t lane, linear, rank, tid[3];
  uint32_t line = 0, carry = 0;
  uint8_t* params = nullptr;
  uint8_t* shared = nullptr;                 // the own cta's
  uint32_t shared_end = 0;                   // first offset outside
  uint64_t memory_low = 1, memory_high = 0;  // the allocation of the last global access
  uint64_t local_low = ~0ull, local_high = 0;

  void* stack_pointer = nullptr;
  uint8_t* stack = nullptr;
  bool polling = false;  // yielded, to poll again later
  uint32_t polls = 0;
  const char* waiting = nullptr;  // the reason; null for a running thread
  uint64_t waiting_for = 0;

  bool cluster_arrived = false;
  uint32_t cluster_phase = 0;
  bool triggered = false;    // launch_dependents
  uint64_t wgmma_group = 0;  // the commit group that is open
  InFlightRegisters* in_flight = nullptr;
  OrderThread* order = nullptr;

  uint8_t* shared_at(uint64_t address, uint32_t size);
  uint8_t* global_at(uint64_t address, uint32_t size);
  uint8_t* local_at(uint64_t address, uint32_t size);
  uint8_t* const_at(uint64_t address, uint32_t size) { return global_at(address, size); }
  uint8_t* generic_at(uint64_t address, uint32_t size);
  uint64_t shared_symbol(uint32_t offset) const {
    return (rank << kSharedOffsetBits) + kSharedBase + offset;
  }
  void add_local(const uint8_t* array, uint64_t size) {
    const uint64_t low = reinterpret_cast<uint64_t>(array);
    if (low < local_low) local_low = low;
    if (low + size > local_high) local_high = low + size;
  }

#ifndef PTXEMU_KERNEL
  std::vector<PendingCopy> open_copies;
  // Lists, because an empty deque takes memory, and each thread of each cta has two of these.
  std::list<std::vector<PendingCopy>> copy_groups;
  std::vector<std::function<void()>> open_bulk;
  std::list<std::vector<std::function<void()>>> bulk_groups;
  std::vector<std::unique_ptr<InFlightRegisters>> in_flight_records;
  std::vector<std::pair<uint32_t*, uint32_t>>
      tensor_loads;  // registers that tcgen05.ld writes, until wait::ld
#endif
};

// Lanes that wait for each other at one instruction.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0, line = 0;
  const char* what = nullptr;
  void* lanes[32];
};

#ifndef PTXEMU_KERNEL
// A wgmma that one warp has issued: 16 rows of D.
struct WarpProduct {
  uint64_t group;
  std::function<void()> compute;
};
#endif

struct Warp {
  Cta* cta;
  uint32_t index, ready = 0, alive = 0, born = 0;
  uint32_t registers = 0;  // per thread, set by setmaxnreg; 0: as launched
  Thread* lanes[32] = {};
  Rendezvous rendezvous[8];
#ifndef PTXEMU_KERNEL
  std::list<WarpProduct> products;
#endif
};

#ifndef PTXEMU_KERNEL
struct NamedBarrier {
  uint32_t expected = 0, count = 0, trues = 0, reductions = 0, result = 0;
  std::vector<Thread*> waiting;
};

constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512;
struct TensorMemory {
  std::unique_ptr<uint32_t[]> cells;  // (lane, column), made when first allocated
  // columns of the allocation that holds these 32; 0 for none
  uint32_t owner[kTensorColumns / 32] = {};
  uint32_t allocated = 0;
  bool permit = true;
};
#endif

struct Cta {
  Cluster* cluster;
  uint32_t ctaid[3], nctaid[3], ntid[3], cluster_ctaid[3], cluster_nctaid[3], clusterid[3],
      nclusterid[3];
  uint32_t rank, cluster_size, explicit_cluster, warp_count, thread_count, sm, sm_count,
      dynamic_shared_bytes, shared_bytes;
  uint32_t alive, untriggered;  // threads
  uint8_t* shared;
  OrderCta* order = nullptr;
#ifndef PTXEMU_KERNEL
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  NamedBarrier barriers[16];
  TensorMemory tensor;
  std::vector<Thread*> register_waiting;  // in setmaxnreg.inc
#endif
};

#ifndef PTXEMU_KERNEL
using Work = std::function<void()>;
struct Cluster {
  Launch* launch;
  OrderCluster* order = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  uint32_t phase = 0, arrived = 0, alive = 0;
  std::vector<Thread*> cluster_waiting;
  std::map<uint64_t*, std::vector<Thread*>> barrier_waiting;
  std::vector<Work> copies;  // done in any order
  std::map<const Thread*, std::deque<Work>>
      tensor;  // tcgen05 work: in order for each thread that issues
  uint8_t* shared_at(uint32_t address) {
    return ctas[address >> kSharedOffsetBits]->shared + (address & 0xffffff);
  }
};

// The parameters of a launch.
struct LaunchRequest {
  const KernelInfo* kernel;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t dynamic_shared_bytes, resident_clusters;
  uint8_t* variables;                                   // the module's global variables
  std::vector<uint8_t> arguments;                       // as laid out for the kernel
  bool explicit_cluster = false, programmatic = false;  // may begin before its predecessor ends
  bool checked = false;  // its kernel was translated for the checker of order
};
struct Launch : LaunchRequest {
  OrderLaunch* order = nullptr;

  uint8_t* params = nullptr;
  uint64_t next = 0, total = 0, finished = 0, triggered_ctas = 0, limit = 1;
  Launch* predecessor = nullptr;
  Thread* held = nullptr;  // waits until the successor can go no further
  std::vector<std::unique_ptr<Cluster>> live;
  std::vector<Thread*> waiting_for_predecessor;
  bool complete() const { return finished == total; }
};
#endif

}  // namespace ptxemu
