#include "core/fork.h"

#include <chrono>
#include <new>
#include <type_traits>
#include <utility>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace nvfp4_moe::internal {

namespace fork_state {
constinit std::atomic<uint32_t> count{0};
constinit std::atomic<int> waiting{0};
}  // namespace fork_state

namespace {

std::atomic<std::thread::id> forked_by{};

// Exists before, and after, every static object that has a mutex.
struct List {
  std::mutex mutex;
  ForkMutex* first = nullptr;
  InEveryChild* first_act = nullptr;
};
static_assert(std::is_trivially_destructible_v<List>);
constinit List list;

void pause_briefly() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

}  // namespace

// Handlers before and after fork(). They allocate nothing.
struct ForkHandlers {
  // Takes the list and every mutex that fork() waits for. Takes all or none and tries again: a
  // thread that holds one may be waiting for another, or for the list.
  static void before() {
    fork_state::waiting.fetch_add(1, std::memory_order_relaxed);
    while (!take_all()) pause_briefly();
    fork_state::waiting.fetch_sub(1, std::memory_order_relaxed);
  }

  static void in_parent() {
    release(nullptr);
    list.mutex.unlock();
  }

  static void in_child() {
    fork_state::count.fetch_add(1, std::memory_order_relaxed);
    fork_state::waiting.store(0, std::memory_order_relaxed);
    forked_by.store(std::this_thread::get_id(), std::memory_order_relaxed);
    for (ForkMutex* m = list.first; m != nullptr; m = m->next_) {
      if (m->at_fork_ != ForkMutex::AtFork::kAbandoned || m->held_by_this_thread()) continue;
      new (&m->mutex_) std::mutex;  // reconstructed in any state, since no thread holds it
      m->holder_.store(std::thread::id(), std::memory_order_relaxed);
    }
    for (const InEveryChild* each = list.first_act; each != nullptr; each = each->next_)
      each->act_(each->of_);
    in_parent();
  }

 private:
  static bool take_all() {
    list.mutex.lock();
    for (ForkMutex* m = list.first; m != nullptr; m = m->next_) {
      if (m->at_fork_ == ForkMutex::AtFork::kAbandoned || m->held_by_this_thread()) continue;
      if (!m->mutex_.try_lock()) {
        release(m);
        list.mutex.unlock();
        return false;
      }
      m->taken_by_fork_ = true;
    }
    return true;
  }

  // Releases the mutexes that take_all took, up to `end`.
  static void release(const ForkMutex* end) {
    for (ForkMutex* m = list.first; m != end; m = m->next_)
      if (std::exchange(m->taken_by_fork_, false)) m->mutex_.unlock();
  }
};

namespace {

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int registered =
    pthread_atfork(ForkHandlers::before, ForkHandlers::in_parent, ForkHandlers::in_child);
#endif

}  // namespace

std::thread::id forking_thread() { return forked_by.load(std::memory_order_relaxed); }

ForkMutex::ForkMutex(AtFork at_fork) : at_fork_(at_fork) {
  const std::lock_guard lock(list.mutex);
  next_ = list.first;
  if (next_ != nullptr) next_->previous_ = this;
  list.first = this;
}

// Threads that lock and unlock in a loop would keep fork() waiting. So a thread that holds no mutex
// lets fork() go first. A thread that holds one has to go on, since fork() waits for it.
void ForkMutex::stand_aside() const {
  if (at_fork_ == AtFork::kAbandoned) return;
  {
    const std::lock_guard lock(list.mutex);
    for (const ForkMutex* m = list.first; m != nullptr; m = m->next_)
      if (m->at_fork_ == AtFork::kWaitedFor && m->held_by_this_thread()) return;
  }
  while (fork_state::waiting.load(std::memory_order_relaxed) != 0) pause_briefly();
}

ForkMutex::~ForkMutex() {
  const std::lock_guard lock(list.mutex);
  (previous_ == nullptr ? list.first : previous_->next_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

InEveryChild::InEveryChild(Act act, void* of) : act_(act), of_(of) {
  const std::lock_guard lock(list.mutex);
  next_ = list.first_act;
  if (next_ != nullptr) next_->previous_ = this;
  list.first_act = this;
}

InEveryChild::~InEveryChild() {
  const std::lock_guard lock(list.mutex);
  (previous_ == nullptr ? list.first_act : previous_->next_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

}  // namespace nvfp4_moe::internal
