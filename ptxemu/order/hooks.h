// Hooks through which the run time reports to the checker of order. They do nothing if the `order`
// of the thread, cluster or launch is null.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/machine.h"

namespace ptxemu {

namespace ordering {
struct Clock;
}

// ---- launches, clusters, threads
bool asked_to_check();  // PTXEMU_CHECK
// The PTX text of a kernel's line numbers, for reports.
void note_source(const KernelInfo* kernel, const std::string* text);
void check_enqueue(Launch& launch);
void check_begin_chain(std::vector<Launch>& chain);
void check_end_chain(std::vector<Launch>& chain);
// Launches that were enqueued will not run.
void check_give_up();
// Memory is freed.
void check_freed(uint64_t low, uint64_t bytes);
// Returns the reports since the last call, or "".
std::string take_findings();
void check_begin_cluster(Cluster& cluster);
void check_end_cluster(Cluster& cluster);
void check_trigger(Thread* T);
void check_prerequisites(Thread* T);
void check_end_thread(Thread* T);

// ---- barriers
void check_warp_sync(Thread* T, uint32_t mask);
void check_arrive(Thread* T, uint32_t barrier);
// The waiting threads, and `last` (may be null), learn the knowledge of all that arrived.
void check_open(Cta* cta, uint32_t barrier, const std::vector<Thread*>& waiting, Thread* last);
void check_cluster_arrive(Thread* T, bool release);
void check_cluster_open(Cluster* cluster);
void check_cluster_pass(Thread* T);

void check_mbarrier_init(Thread* T, const uint64_t* at);
void check_mbarrier_arrive(Thread* T, const uint64_t* at, bool release);
// over: whether the phase has ended.
void check_mbarrier_pass(Thread* T, const uint64_t* at, bool over, bool acquired);
void check_mbarrier_phase(const uint64_t* at);

// ---- asynchronous copies
void check_copy_async(Thread* T, const uint8_t* to, const uint8_t* from, uint32_t size,
                      uint32_t source_bytes);
void check_copy_group(Thread* T);                       // commit_group
constexpr uint32_t kNoneOpen = ~0u;                     // wait_all
void check_copy_wait(Thread* T, uint32_t groups_left);  // wait_group
// An agent's work up to a number.
struct AgentNumber {
  uint32_t cta, slot, number;
};
// cp.async.mbarrier.arrive: the copies before it; then their arrival, which releases them.
AgentNumber check_copy_arrive(Thread* T);
void check_copy_done(Cluster* cluster, AgentNumber copies, const uint64_t* at);
// A piece of a copy that completes at an mbarrier: when it is issued, and when it is done. from may
// be null.
void check_bulk(Thread* T, const uint8_t* to, const uint8_t* from, uint32_t size,
                const uint64_t* at);
void check_bulk_done(Cluster* cluster, const uint8_t* to, const uint8_t* from, uint32_t size,
                     const uint64_t* at, uint32_t line);
// A piece of global memory that a tensor copy reads: compared with writes before it, not kept as a
// read.
void check_bulk_source(Thread* T, const uint8_t* at, uint32_t size);
// A piece of a store in a bulk group: what it reads, or writes.
void check_bulk_store(Thread* T, const uint8_t* at, uint32_t size, bool write);
void check_bulk_group(Thread* T);
void check_bulk_wait(Thread* T, uint32_t groups_left, bool reads_alone);

// ---- matrices: reads and writes by the whole warp of T
void check_collective(Thread* T, const uint8_t* at, uint32_t size, bool write);
void check_wgmma_fence(Thread* T);
void check_wgmma_read(Thread* T, const uint8_t* at, uint32_t size);
void check_wgmma_wait(Thread* T, uint64_t before_group);

// ---- tensor memory and what tcgen05 reads of shared memory
enum class TensorAgent : uint8_t {
  kQueue,
  kLoad,
  kStore
};  // a thread's products and copies; a warp's ld and st
void check_tensor(Thread* T, TensorAgent agent, const void* at, uint32_t size, bool write);
void check_tensor_operand(Thread* T, const uint8_t* at, uint32_t size);
void check_tensor_wait(Thread* T, TensorAgent agent);
// tcgen05.dealloc: must come after all accesses to a lane's columns. Their next owner does not
// learn about those accesses.
void check_tensor_freed(Thread* T, const void* at, uint32_t size);
// tcgen05.commit: the work before it, and what its thread knew then; then its arrival, which
// releases both.
struct TensorCommit {
  AgentNumber work;
  std::shared_ptr<const ordering::Clock> known;
};
TensorCommit check_tensor_commit(Thread* T);
void check_tensor_done(Cluster* cluster, const TensorCommit& commit, const uint64_t* at);

}  // namespace ptxemu
