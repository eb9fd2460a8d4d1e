// Asynchronous work, and its order relative to the warps.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/processor.h"

namespace ptxemu {

#ifdef PTXEMU_PLANT
Fault planted_fault = Fault::kNone;
#endif

Order asked_order() {
  const char* name = std::getenv("PTXEMU_ORDER");
  if (!name || !*name || !std::strcmp(name, "at-once")) return Order::kAtOnce;
  if (!std::strcmp(name, "random")) return Order::kRandom;
  if (!std::strcmp(name, "late")) return Order::kLate;
  std::fprintf(stderr, "ptxemu: PTXEMU_ORDER: expected at-once, random or late, got %s\n", name);
  std::abort();
}

void seed_random() {
  static uint64_t last = ~0ull;
  const char* asked = std::getenv("PTXEMU_SEED");
  const uint64_t seed = asked ? std::strtoull(asked, nullptr, 0) : 0;
  if (seed == last) return;
  last = seed;
  processor.random = (88172645463325252ull ^ seed * 0x9e3779b97f4a7c15ull) | 1;
}

uint32_t random_number() {
  uint64_t& random_state = processor.random;
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 11);
}

Order order() { return processor.order; }

void note_progress() { ++processor.progress; }
uint64_t clock_now() {
  static uint64_t now = 0;
  return now += 16;
}
uint64_t global_timer() {
  processor.outside = true;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  if (planted(Fault::timer_stands)) return 0;
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
uint64_t variable_address(Thread* T, uint64_t offset) {
  return reinterpret_cast<uint64_t>(T->cta->cluster->launch->variables) + offset;
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
    // As late as possible: the newest item is done first.
    const size_t at = order() == Order::kRandom ? random_number() % cluster->copies.size()
                                                : cluster->copies.size() - 1;
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

}  // namespace ptxemu
