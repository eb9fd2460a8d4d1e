// Support for processes that are forked from one that uses the library.
//
// fork() copies memory and the calling thread, but no other thread. So in the child a thread pool
// has no threads, locks of the parent's other threads stay locked, and their use counts stay
// counted. This file has what the rest of the library needs to cope: a number that tells child from
// parent, and a mutex that fork() handles.
//
// It relies on pthread_atfork, which fork() and its callers (Python's os.fork, multiprocessing)
// honour. A raw clone() does not. vfork and posix_spawn run nothing of the library.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace nvfp4_moe::internal {

namespace fork_state {
extern std::atomic<uint32_t> count;
extern std::atomic<int> waiting;  // threads in fork() that do not have all mutexes yet
}  // namespace fork_state

// The number of forks between the first process and this one. An object that remembers the number
// can see that it was made in a parent. One load.
inline uint32_t fork_count() { return fork_state::count.load(std::memory_order_relaxed); }

// The thread that forked, which is the only thread that exists in the child. In the first process,
// the id of no thread.
std::thread::id forking_thread();

// Runs a function in the child of every fork while this object exists, before fork() returns. It
// runs on the only thread. It must not lock or allocate, since the parent's other threads may have
// been in the middle of anything.
class InEveryChild {
 public:
  using Act = void (*)(void* of);
  InEveryChild(Act act, void* of);
  ~InEveryChild();
  InEveryChild(const InEveryChild&) = delete;
  InEveryChild& operator=(const InEveryChild&) = delete;

 private:
  friend struct ForkHandlers;
  const Act act_;
  void* const of_;
  InEveryChild* previous_ = nullptr;  // list of all, under the mutex of the list of mutexes
  InEveryChild* next_ = nullptr;
};

// A mutex that is never held by a thread that does not exist.
//
// - kWaitedFor: fork() waits until it has the mutex, so that the child finds the guarded data
//   consistent. A thread that holds one must not wait for anything that a thread in fork() may
//   hold, above all a caller's lock or Python's.
// - kAbandoned: fork() does not wait. In the child the mutex is free, and the guarded data is as
//   some thread left it.
//
// A mutex that the forking thread holds is still held in the child.
class ForkMutex {
 public:
  enum class AtFork : bool { kWaitedFor, kAbandoned };
  explicit ForkMutex(AtFork at_fork = AtFork::kWaitedFor);
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() {
    if (fork_state::waiting.load(std::memory_order_relaxed) != 0) stand_aside();
    mutex_.lock();
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  void unlock() {
    holder_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  friend struct ForkHandlers;
  void stand_aside() const;
  bool held_by_this_thread() const {
    return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};
  const AtFork at_fork_;
  bool taken_by_fork_ = false;
  ForkMutex* previous_ = nullptr;  // the list of all, guarded by the list's own mutex
  ForkMutex* next_ = nullptr;
};

}  // namespace nvfp4_moe::internal
