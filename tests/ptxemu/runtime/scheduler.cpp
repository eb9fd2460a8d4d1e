// Fibers and who runs next.
//
// One OS thread runs all fibers. Warps take turns; the lanes of a warp run one after the other, each until it waits, so
// a thread is never interrupted between two instructions that do not wait. Asynchronous work is done at once, at random
// moments, or only when nobody can go on without it.
#include "runtime/scheduler.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include "runtime/control.h"
#include "runtime/memory_map.h"

namespace ptxemu {

#ifdef PTXEMU_PLANT
Fault planted_fault = Fault::kNone;
#endif

namespace {

constexpr size_t kStackBytes = 1 << 20, kStackGuard = 1 << 14;
// A round in which all that ran only looked at memory again is idle; after so many the launch is taken for stuck.
constexpr uint64_t kMostIdleRounds = 20000;

void* scheduler_stack;
Thread* running;
bool failed;
std::string failure;
uint64_t progress_count;
Counters counted;

uint64_t random_state = 0;
Order chosen_order = Order::kAtOnce;

Order asked_order() {
  const char* name = std::getenv("PTXEMU_ORDER");
  if (!name || !*name || !std::strcmp(name, "at-once")) return Order::kAtOnce;
  if (!std::strcmp(name, "random")) return Order::kRandom;
  if (!std::strcmp(name, "late")) return Order::kLate;
  std::fprintf(stderr, "ptxemu: PTXEMU_ORDER: expected at-once, random or late, got %s\n", name);
  std::abort();
}

std::vector<uint8_t*>& free_stacks() {
  static auto* stacks = new std::vector<uint8_t*>;
  return *stacks;
}

uint8_t* take_stack() {
  if (!free_stacks().empty()) {
    uint8_t* stack = free_stacks().back();
    free_stacks().pop_back();
    return stack;
  }
  void* base = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw LaunchFailure("ptxemu: no memory for a thread's stack");
  mprotect(base, kStackGuard, PROT_NONE);
  return static_cast<uint8_t*>(base);
}

}  // namespace

extern "C" void ptxemu_switch(void** save, void* load);
asm(R"(.text
.globl ptxemu_switch
.hidden ptxemu_switch
.type ptxemu_switch,@function
ptxemu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

bool trigger(Thread* T);

namespace {

void back_to_scheduler(Thread* T) { ptxemu_switch(&T->stack_pointer, scheduler_stack); }

void end_thread(Thread* T) {
  note_progress();
  finish_copies(T);
  T->cta->alive--;
  T->cta->cluster->alive--;
  T->warp->alive &= ~(1u << T->lane);
  leave_barriers(T);
  trigger(T);
  back_to_scheduler(T);
}

void fiber_main() {
  Thread* T = running;
  T->cta->cluster->launch->kernel->run(T);
  end_thread(T);
  __builtin_unreachable();
}

std::string coordinates(const uint32_t* x) { return "(" + std::to_string(x[0]) + "," + std::to_string(x[1]) + "," + std::to_string(x[2]) + ")"; }

// What each warp waits for, lanes that wait for the same together.
void report_cluster(std::ostringstream& out, const Cluster& cluster) {
  for (const auto& cta : cluster.ctas)
    for (const Warp& warp : cta->warps) {
      std::map<std::string, uint32_t> lanes;
      for (uint32_t lane = 0; lane < 32; ++lane) {
        if (!(warp.alive >> lane & 1)) continue;
        const Thread& thread = *warp.lanes[lane];
        std::ostringstream state;
        if (thread.waiting)
          state << "waits for " << thread.waiting << " 0x" << std::hex << thread.waiting_for << std::dec;
        else
          state << (thread.polling ? "polls" : "runs");
        state << ", PTX line " << thread.line;
        lanes[state.str()] |= 1u << lane;
      }
      for (const auto& [state, mask] : lanes) {
        char text[16];
        std::snprintf(text, sizeof text, "%08x", mask);
        out << "  cta " << coordinates(cta->ctaid) << " rank " << cta->rank << " warp " << warp.index << " lanes " << text << ": " << state << "\n";
      }
    }
}

void report_barriers(std::ostringstream& out, const Cluster& cluster) {
  for (const auto& [barrier, waiting] : cluster.barrier_waiting) {
    if (waiting.empty()) continue;
    const uint64_t value = *barrier;
    out << "  mbarrier that " << waiting.size() << " threads wait for: phase " << (value >> 63) << ", " << (value & 0xfffff) << " of " << (value >> 20 & 0xfffff)
        << " arrivals and " << static_cast<int64_t>(value >> 40 & 0x7fffff) - (1 << 22) << " bytes pending\n";
  }
}

void stop(const std::string& report) {
  failed = true;
  failure = report;
  std::fputs(report.c_str(), stderr);
}

std::string headline(const Launch& launch) { return std::string(" in kernel ") + launch.kernel->name + "\n"; }

}  // namespace

uint32_t random_number() {
  if (!random_state) {
    const char* seed = std::getenv("PTXEMU_SEED");
    random_state = 88172645463325252ull ^ (seed ? std::strtoull(seed, nullptr, 0) : 0) * 0x9e3779b97f4a7c15ull;
    if (!random_state) random_state = 1;
  }
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 11);
}

Order order() { return chosen_order; }

const Counters& counters() { return counted; }
void note_progress() { ++progress_count; }
uint64_t clock_now() {
  static uint64_t now = 0;
  return now += 16;
}
uint64_t variable_address(Thread* T, uint64_t offset) { return reinterpret_cast<uint64_t>(T->cta->cluster->launch->variables) + offset; }

void fault(Thread* T, const char* what) {
  std::ostringstream out;
  const Launch& launch = *T->cta->cluster->launch;
  out << "ptxemu: " << what << headline(launch);
  out << "  thread " << coordinates(T->tid) << " of cta " << coordinates(T->cta->ctaid) << ", PTX line " << T->line << "\n";
  stop(out.str());
  if (running) back_to_scheduler(T);
  throw LaunchFailure(failure);
}

void fault_work(Cluster* cluster, const char* what) {
  std::ostringstream out;
  out << "ptxemu: " << what << ", in asynchronous work of a cluster that begins with cta " << coordinates(cluster->ctas[0]->ctaid) << headline(*cluster->launch);
  report_cluster(out, *cluster);
  stop(out.str());
  if (running) back_to_scheduler(running);
  throw LaunchFailure(failure);
}

void fault_address(Thread* T, const char* space, uint64_t address, uint32_t size) {
  std::ostringstream out;
  const bool aligned = !misaligned(address, size);
  out << (aligned ? "out of bounds: " : "misaligned: ") << size << " bytes of " << space << " memory at 0x" << std::hex << address << std::dec;
  if (std::strcmp(space, "global") == 0) out << ", " << describe_address(address);
  if (std::strcmp(space, "shared") == 0) out << ", the cta has " << T->cta->shared_bytes << " bytes from 0x400";
  fault(T, out.str().c_str());
}

bool find_allocation(Thread* T, uint64_t address, uint32_t size) {
  if (planted(Fault::bounds_unchecked)) return true;
  return allocated(address, size, &T->memory_low, &T->memory_high);
}

uint8_t* shared_elsewhere(Thread* T, uint32_t address, uint32_t size) {
  const uint32_t rank = address >> kSharedOffsetBits, offset = address & 0xffffff;
  const bool inside = offset >= kSharedBase && offset + size <= T->shared_end;
  if (rank >= T->cta->cluster_size || misaligned(address, size) || (!inside && !planted(Fault::shared_unchecked)))
    fault_address(T, "shared", address, size);
  return T->cta->cluster->ctas[rank]->shared + offset;
}

void park(Thread* T, const char* what, uint64_t about) {
  T->waiting = what;
  T->waiting_for = about;
  back_to_scheduler(T);
  T->waiting = nullptr;
}

void yield(Thread* T) {
  T->polling = true;
  wake(T);
  back_to_scheduler(T);
  T->polling = false;
}

void exit_thread(Thread* T) {
  end_thread(T);
  __builtin_unreachable();
}

// The successor may begin once all threads of every cta have triggered or ended. True for the last one.
bool trigger(Thread* T) {
  if (T->triggered) return false;
  T->triggered = true;
  Cta* cta = T->cta;
  if (--cta->untriggered != 0) return false;
  Launch* launch = cta->cluster->launch;
  return ++launch->triggered_ctas == uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
}

// In late order the last thread waits until the successor can go no further, so that what comes after is seen late.
void launch_dependents(Thread* T) {
  if (!trigger(T) || order() != Order::kLate) return;
  T->cta->cluster->launch->held = T;
  park(T, "its dependents to begin (late order)", 0);
}

void wait_for_prerequisites(Thread* T) {
  Launch* launch = T->cta->cluster->launch;
  if (!launch->predecessor || launch->predecessor->complete() || planted(Fault::dependents_early)) return;
  launch->waiting_for_predecessor.push_back(T);
  park(T, "the preceding launch (griddepcontrol.wait)", 0);
}

void enqueue_copy(Cluster* cluster, Work work) {
  if (order() == Order::kAtOnce)
    work();
  else
    cluster->copies.push_back(std::move(work));
}
void enqueue_tensor_work(Thread* T, Work work) {
  if (order() == Order::kAtOnce)
    work();
  else
    T->cta->cluster->tensor[T].push_back(std::move(work));
}

bool do_some_work(Cluster* cluster) {
  const size_t queues = cluster->tensor.size() + !cluster->copies.empty();
  if (queues == 0) return false;
  note_progress();
  size_t chosen = random_number() % queues;
  if (!cluster->copies.empty() && chosen-- == 0) {
    // As late as possible means that what came last is done first.
    const size_t at = order() == Order::kRandom ? random_number() % cluster->copies.size() : cluster->copies.size() - 1;
    const Work work = std::move(cluster->copies[at]);
    cluster->copies.erase(cluster->copies.begin() + static_cast<std::ptrdiff_t>(at));
    work();
    return true;
  }
  const auto queue = std::next(cluster->tensor.begin(), static_cast<std::ptrdiff_t>(chosen));
  const Work work = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) cluster->tensor.erase(queue);
  work();
  return true;
}

// ---- launches
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
  thread.stack = take_stack();
  uint64_t* top = reinterpret_cast<uint64_t*>(thread.stack + kStackBytes - 64);
  *--top = 0;  // the stack's alignment at a function's entry
  *--top = reinterpret_cast<uint64_t>(&fiber_main);
  for (int saved = 0; saved < 6; ++saved) *--top = 0;
  thread.stack_pointer = top;
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
  cta->shared_bytes = kSharedBase + launch.kernel->static_shared_bytes + launch.dynamic_shared_bytes;
  // Shared memory lies on a boundary of 1 KiB, which swizzled copies and descriptors count from.
  cta->shared = static_cast<uint8_t*>(std::aligned_alloc(1024, (cta->shared_bytes + 2047) / 1024 * 1024));
  std::memset(cta->shared, kSharedPoison, cta->shared_bytes);
  cta->warps.resize(cta->warp_count);
  cta->threads = std::vector<Thread>(threads);
  for (uint32_t i = 0; i < threads; ++i) place_thread(cta->threads[i], *cta, i, launch);
  counted.threads += threads;
  return cta;
}

void start_cluster(Launch& launch) {
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = &launch;
  const uint32_t size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  for (uint32_t rank = 0; rank < size; ++rank) cluster->ctas.push_back(make_cta(launch, cluster.get(), launch.next, rank));
  cluster->alive = size * cluster->ctas[0]->thread_count;
  ++launch.next;
  ++counted.clusters;
  launch.live.push_back(std::move(cluster));
}

void free_cluster(Cluster& cluster) {
  for (auto& cta : cluster.ctas) {
    for (Thread& thread : cta->threads) free_stacks().push_back(thread.stack);
    std::free(cta->shared);
  }
}

// Runs every ready lane of a warp once. Whether one did more than look again.
bool run_warp(Warp& warp) {
  bool worked = false;
  uint32_t lanes = warp.ready;
  while (lanes) {
    const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
    lanes &= lanes - 1;
    if (!(warp.ready >> lane & 1)) continue;
    warp.ready &= ~(1u << lane);
    running = warp.lanes[lane];
    ptxemu_switch(&scheduler_stack, running->stack_pointer);
    worked |= !running->polling;
    running = nullptr;
    if (failed) throw LaunchFailure(failure);
  }
  return worked;
}

bool run_cluster(Cluster& cluster) {
  bool worked = false;
  const bool random = order() == Order::kRandom;
  for (auto& cta : cluster.ctas) {
    const uint32_t first = random ? random_number() % cta->warp_count : 0;
    for (uint32_t i = 0; i < cta->warp_count; ++i) {
      Warp& warp = cta->warps[(first + i) % cta->warp_count];
      if (!warp.ready) continue;
      if (random && random_number() % 4 == 0)
        worked = true;  // its turn is left out
      else
        worked |= run_warp(warp);
    }
  }
  if (random)
    while (random_number() % 3 == 0 && do_some_work(&cluster)) worked = true;
  return worked;
}

// Takes clusters away whose threads have ended.
bool retire(Launch& launch) {
  bool any = false;
  for (size_t i = 0; i < launch.live.size();) {
    Cluster& cluster = *launch.live[i];
    if (cluster.alive) {
      ++i;
      continue;
    }
    while (do_some_work(&cluster)) {
    }
    for (auto& cta : cluster.ctas)
      if (cta->tensor.allocated) fault_work(&cluster, "tensor memory was not deallocated");
    free_cluster(cluster);
    launch.live.erase(launch.live.begin() + static_cast<std::ptrdiff_t>(i));
    ++launch.finished;
    any = true;
  }
  return any;
}

bool may_begin(const Launch& launch) {
  if (!launch.predecessor || launch.predecessor->complete()) return true;
  const Launch& before = *launch.predecessor;
  const uint64_t ctas = uint64_t(before.grid[0]) * before.grid[1] * before.grid[2];
  return launch.programmatic && before.triggered_ctas == ctas;
}

// Threads whose try_wait may end without success are let go once, to look again.
bool release_waiting(Launch& launch) {
  bool any = false;
  for (auto& cluster : launch.live) {
    auto waiting = std::move(cluster->barrier_waiting);
    cluster->barrier_waiting.clear();
    for (auto& [barrier, threads] : waiting)
      for (Thread* thread : threads) {
        wake(thread);
        any = true;
      }
  }
  return any;
}

[[noreturn]] void report_deadlock(std::vector<Launch>& chain, const char* what) {
  std::ostringstream out;
  for (Launch& launch : chain) {
    if (launch.complete() || launch.live.empty()) continue;
    out << "ptxemu: " << what << headline(launch) << "  " << launch.finished << " of " << launch.total << " clusters have ended, " << launch.live.size() << " wait\n";
    for (auto& cluster : launch.live) {
      report_cluster(out, *cluster);
      report_barriers(out, *cluster);
    }
  }
  stop(out.str());
  throw LaunchFailure(failure);
}

class Chain {
 public:
  explicit Chain(std::vector<Launch>& launches) : launches_(launches) {
    for (size_t i = 0; i < launches.size(); ++i) prepare(launches[i], i ? &launches[i - 1] : nullptr);
  }
  ~Chain() {
    for (Launch& launch : launches_) {
      for (auto& cluster : launch.live) free_cluster(*cluster);
      launch.live.clear();
      unregister_memory(reinterpret_cast<uint64_t>(launch.params));
      std::free(launch.params);
    }
    running = nullptr;
    failed = false;
  }

  void run() {
    uint64_t idle = 0, seen = ~0ull, released = 0;
    while (!launches_.back().complete()) {
      const bool worked = round();
      if (worked) {
        idle = 0;
        continue;
      }
      // Nobody went on by himself: asynchronous work, then further clusters, then those whose waits may time out.
      if (release_held() || work() || grow()) continue;
      if (progress_count != seen) seen = progress_count, released = 0;
      if (released < 4 && release()) {
        ++released;
        continue;
      }
      if (!polling_) report_deadlock(launches_, "deadlock");
      if (++idle > kMostIdleRounds) report_deadlock(launches_, "no progress: all threads that run only look at memory again");
    }
  }

 private:
  static void prepare(Launch& launch, Launch* predecessor) {
    launch.predecessor = predecessor;
    launch.total = uint64_t(launch.grid[0] / launch.cluster[0]) * (launch.grid[1] / launch.cluster[1]) * (launch.grid[2] / launch.cluster[2]);
    const size_t bytes = (launch.arguments.size() + 255) / 128 * 128;
    launch.params = static_cast<uint8_t*>(std::aligned_alloc(128, bytes));
    std::memcpy(launch.params, launch.arguments.data(), launch.arguments.size());
    register_memory(reinterpret_cast<uint64_t>(launch.params), launch.arguments.size(), "kernel arguments");
    launch.limit = order() == Order::kRandom ? 1 + random_number() % 4 : 1;
    ++counted.launches;
  }

  bool round() {
    bool worked = false;
    polling_ = false;
    // Late order favours the successor, so that it runs as far as it may before its predecessor ends.
    for (size_t i = 0; i < launches_.size(); ++i) {
      Launch& launch = launches_[order() == Order::kLate ? launches_.size() - 1 - i : i];
      if (launch.complete() || !may_begin(launch)) continue;
      if (launch.predecessor && launch.predecessor->complete()) {
        for (Thread* thread : launch.waiting_for_predecessor) wake(thread);
        launch.waiting_for_predecessor.clear();
      }
      while (launch.live.size() < launch.limit && launch.next < launch.total) start_cluster(launch), worked = true;
      for (size_t c = 0; c < launch.live.size(); ++c) {
        worked |= run_cluster(*launch.live[c]);
        for (auto& cta : launch.live[c]->ctas)
          for (Warp& warp : cta->warps) polling_ |= warp.ready != 0;
      }
      worked |= retire(launch);
    }
    return worked;
  }
  bool release_held() {
    bool any = false;
    for (Launch& launch : launches_)
      if (launch.held) {
        wake(launch.held);
        launch.held = nullptr;
        any = true;
      }
    return any;
  }
  bool work() {
    bool any = false;
    for (Launch& launch : launches_)
      for (auto& cluster : launch.live) any |= do_some_work(cluster.get());
    return any;
  }
  bool grow() {
    bool any = false;
    for (Launch& launch : launches_)
      if (may_begin(launch) && launch.next < launch.total && launch.live.size() < launch.resident_clusters) {
        launch.limit = launch.live.size() + 1;
        any = true;
      }
    return any;
  }
  bool release() {
    bool any = false;
    for (Launch& launch : launches_) any |= release_waiting(launch);
    return any;
  }

  std::vector<Launch>& launches_;
  bool polling_ = false;
};

}  // namespace

void run_chain(std::vector<Launch>& chain) {
  chosen_order = asked_order();
  if (!chain.empty()) Chain(chain).run();
}

}  // namespace ptxemu
