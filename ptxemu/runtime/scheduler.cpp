// Scheduling of fibers.
//
// One OS thread runs all fibers. Warps are scheduled round-robin. The lanes of a warp run one after
// another, each until it waits, so a thread is never interrupted between two instructions that do
// not wait. Asynchronous work is done immediately, at random moments, or only when nothing else can
// proceed. A run whose threads sleep or read the time may depend on other host threads, and is
// considered stuck only after PTXEMU_PATIENCE.
#include "runtime/scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/memory_map.h"
#include "runtime/processor.h"
#include "runtime/reports.h"

namespace ptxemu {
namespace {

// A round in which all threads only polled memory is idle. After this many the launch is considered
// stuck.
constexpr uint64_t kMostIdleRounds = 20000;
// In random order some warps are skipped in a round. After this many rounds without progress, none
// is possible.
constexpr uint64_t kMostSkippedRounds = 8;
// Idle rounds after which other runs have a turn.
constexpr uint64_t kIdleTurn = 64;

// Runs every ready lane of a warp once. Returns whether one did more than poll.
bool run_warp(Warp& warp) {
  bool worked = false;
  uint32_t lanes = warp.ready;
  while (lanes) {
    const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
    lanes &= lanes - 1;
    if (!(warp.ready >> lane & 1)) continue;
    warp.ready &= ~(1u << lane);
    run_fiber(warp.lanes[lane]);
    worked |= !warp.lanes[lane]->polling;
    if (processor.failed) throw LaunchFailure(processor.failure);
  }
  return worked;
}

// skipped: whether a warp's turn was left out.
bool run_cluster(Cluster& cluster, bool& skipped) {
  bool worked = false;
  const bool random = order() == Order::kRandom;
  for (auto& cta : cluster.ctas) {
    const uint32_t first = random ? random_number() % cta->warp_count : 0;
    for (uint32_t i = 0; i < cta->warp_count; ++i) {
      Warp& warp = cta->warps[(first + i) % cta->warp_count];
      if (!warp.ready) continue;
      if (random && random_number() % 4 == 0)
        skipped = true;
      else
        worked |= run_warp(warp);
    }
  }
  if (random)
    while (random_number() % 3 == 0 && do_some_work(&cluster)) worked = true;
  return worked;
}

// Removes clusters whose threads have ended.
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

// Wakes threads whose try_wait may end without success once, to poll again.
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
    out << "ptxemu: " << what << headline(launch.kernel) << "  " << launch.finished << " of "
        << launch.total << " clusters have ended, " << launch.live.size() << " wait\n";
    for (auto& cluster : launch.live) {
      report_cluster(out, *cluster);
      report_barriers(out, *cluster);
    }
  }
  stop(out.str());
  throw LaunchFailure(processor.failure);
}

}  // namespace

Run::Run(std::vector<Launch> launches) : launches_(std::move(launches)), order_(asked_order()) {
  processor.order = order_;
  seed_random();
  for (size_t i = 0; i < launches_.size(); ++i)
    prepare(launches_[i], i ? &launches_[i - 1] : nullptr);
  check_begin_chain(launches_);
}

Run::~Run() {
  for (Launch& launch : launches_) {
    for (auto& cluster : launch.live) free_cluster(*cluster);
    launch.live.clear();
    unregister_memory(reinterpret_cast<uint64_t>(launch.params));
    std::free(launch.params);
  }
  check_end_chain(launches_);
}

Run::State Run::go_on(bool& worked, bool patient) {
  processor.order = order_;
  processor.progress = progress_;
  processor.outside = outside_;
  try {
    const State state = advance(worked, patient);
    progress_ = processor.progress;
    outside_ = processor.outside;
    const std::string findings = state == State::kEnded ? take_findings() : "";
    if (!findings.empty()) throw LaunchFailure(findings);
    return state;
  } catch (const LaunchFailure& failure) {
    processor.running = nullptr;
    processor.failed = false;
    throw LaunchFailure(failure.what() + take_findings());
  }
}

Run::State Run::advance(bool& worked, bool patient) {
  while (!launches_.back().complete()) {
    if (round()) {
      idle_ = skipped_rounds_ = 0;
      processor.outside = false;
      worked = true;
      continue;
    }
    if (skipped_ && ++skipped_rounds_ < kMostSkippedRounds) continue;
    // No thread made progress: do asynchronous work, then start further clusters, then wake threads
    // whose waits may time out.
    if (release_held() || work() || grow()) {
      worked = true;
      continue;
    }
    if (processor.progress != seen_) seen_ = processor.progress, released_ = 0;
    if (released_ < 4 && release()) {
      ++released_;
      continue;
    }
    if (!polling_) report_deadlock(launches_, "deadlock");
    if (processor.outside) {
      if (!patient)
        report_deadlock(launches_, "nobody has come for whom threads wait (PTXEMU_PATIENCE)");
      return State::kWaits;
    }
    if (++idle_ > kMostIdleRounds)
      report_deadlock(launches_, "no progress: all threads that run only look at memory again");
    if (idle_ % kIdleTurn == 0) return State::kPolls;
  }
  worked = true;
  return State::kEnded;
}

void Run::forget_allocations() {
  for (Launch& launch : launches_)
    for (auto& cluster : launch.live)
      for (auto& cta : cluster->ctas)
        for (Thread& thread : cta->threads) thread.memory_low = 1, thread.memory_high = 0;
}

void Run::prepare(Launch& launch, Launch* predecessor) {
  launch.predecessor = predecessor;
  launch.total = uint64_t(launch.grid[0] / launch.cluster[0]) *
                 (launch.grid[1] / launch.cluster[1]) * (launch.grid[2] / launch.cluster[2]);
  const size_t bytes = (launch.arguments.size() + 255) / 128 * 128;
  launch.params = static_cast<uint8_t*>(std::aligned_alloc(128, bytes));
  std::memcpy(launch.params, launch.arguments.data(), launch.arguments.size());
  register_memory(reinterpret_cast<uint64_t>(launch.params), launch.arguments.size(),
                  "kernel arguments");
  launch.limit = order_ == Order::kRandom ? 1 + random_number() % 4 : 1;
}

bool Run::round() {
  bool worked = false;
  polling_ = skipped_ = false;
  // Late order favours the successor, so that it runs as far as it may before its predecessor ends.
  for (size_t i = 0; i < launches_.size(); ++i) {
    Launch& launch = launches_[order() == Order::kLate ? launches_.size() - 1 - i : i];
    if (launch.complete() || !may_begin(launch)) continue;
    if (launch.predecessor && launch.predecessor->complete()) {
      for (Thread* thread : launch.waiting_for_predecessor) wake(thread);
      launch.waiting_for_predecessor.clear();
    }
    while (launch.live.size() < launch.limit && launch.next < launch.total)
      start_cluster(launch), worked = true;
    for (size_t c = 0; c < launch.live.size(); ++c) {
      worked |= run_cluster(*launch.live[c], skipped_);
      for (auto& cta : launch.live[c]->ctas)
        for (Warp& warp : cta->warps) polling_ |= warp.ready != 0;
    }
    worked |= retire(launch);
  }
  return worked;
}

bool Run::release_held() {
  bool any = false;
  for (Launch& launch : launches_)
    if (launch.held) {
      wake(launch.held);
      launch.held = nullptr;
      any = true;
    }
  return any;
}

bool Run::work() {
  bool any = false;
  for (Launch& launch : launches_)
    for (auto& cluster : launch.live) any |= do_some_work(cluster.get());
  return any;
}

bool Run::grow() {
  bool any = false;
  for (Launch& launch : launches_)
    if (may_begin(launch) && launch.next < launch.total &&
        launch.live.size() < launch.resident_clusters) {
      launch.limit = launch.live.size() + 1;
      any = true;
    }
  return any;
}

bool Run::release() {
  bool any = false;
  for (Launch& launch : launches_) any |= release_waiting(launch);
  return any;
}

}  // namespace ptxemu
