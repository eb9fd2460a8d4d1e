// Support for processes that are forked from one that uses the library.
//
// fork() copies memory and the calling thread, and no other thread. So in the child a thread pool
// has no threads, what the parent's other threads had locked stays locked, and what they had
// counted as in use stays counted. Here is what the rest of the library needs to cope: a number
// that tells child from parent, and a mutex that fork() goes around.
//
// All of it hangs on pthread_atfork, which fork() and what is built on it (Python's os.fork,
// multiprocessing) honour; a raw clone() does not. vfork and posix_spawn run nothing of the
// library.
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

// How many forks lie between the first process and this one. Something that remembers the number
// can see that it was made in a parent. One load.
inline uint32_t fork_count() { return fork_state::count.load(std::memory_order_relaxed); }

// The thread that forked, which is the one thread that came along; in the first process no thread's
// id.
std::thread::id forking_thread();

// What is done in the child of every fork as long as this is there, before fork() returns: on the
// one thread, without a lock or an allocation, whatever the parent's other threads were in the
// middle of.
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
  InEveryChild* previous_ = nullptr;  // the list of all, guarded by the mutexes' list's own
  InEveryChild* next_ = nullptr;
};

// A mutex that is never held by a thread that does not exist.
//
// kWaitedFor: fork() waits until it has the mutex, so that the child finds what it guards whole.
// Whoever holds one must not wait for something that a thread in fork() may hold, a caller's lock
// or Python's above all. kAbandoned: fork() does not wait; in the child the mutex is free, and what
// it guards as some thread left it. A mutex that the forking thread holds is still held in the
// child.
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
