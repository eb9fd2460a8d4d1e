// The thread pool of Executor.
//
// A call publishes its job under the mutex and raises seq_. Workers that see it (spinning briefly,
// then sleeping on the condition) join by counting themselves in, take ranges from one atomic
// counter, and count themselves out. The caller takes ranges too, then closes the job and waits
// only for workers that joined: one that slept through costs nothing. It is undefined which thread
// computes which range, since no result may depend on it. A body that throws ends the job: ranges
// that have not been taken are dropped, and once every thread has left, the caller rethrows the
// first exception.
#include "core/executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sched.h>
#endif

#include "core/fork.h"

namespace nvfp4_moe::internal {
namespace {

// True while this thread runs a body. A nested call then runs inline, since the pool is busy with
// the outer one.
thread_local bool inside_body = false;

// Spins before sleeping: some tens of microseconds, about the gap between two steps of a layer.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void run_inline(int64_t count, int64_t grain, const Executor::Body& body) {
  for (int64_t begin = 0; begin < count; begin += grain)
    body(begin, std::min(count, begin + grain));
}

int available_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class SerialExecutor final : public Executor {
 public:
  void parallel_for(int64_t count, int64_t grain, const Body& body) override {
    run_inline(count, std::max<int64_t>(grain, 1), body);
  }
  int threads() const override { return 1; }
};

class Pool {
 public:
  // If the system gives no more threads, or no memory for one, the pool is smaller.
  explicit Pool(int threads) {
    try {
      workers_.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
  }

  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      seq_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  void parallel_for(int64_t count, int64_t grain, const Executor::Body& body) {
    if (count <= 0) return;
    grain = std::max<int64_t>(grain, 1);
    if (inside_body || workers_.empty() || count <= grain) return run_inline(count, grain, body);
    const std::lock_guard calls(call_mutex_);
    Job job{count, grain, &body};
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      seq_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_ranges(job);
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // no thread joins any more
    if (joined_.load(std::memory_order_acquire) != 0) {
      lock.unlock();
      for (int i = 0; i < kSpins && joined_.load(std::memory_order_acquire) != 0; ++i) relax();
      lock.lock();
      done_.wait(lock, [this] { return joined_.load(std::memory_order_acquire) == 0; });
    }
    if (job.failure) std::rethrow_exception(std::move(job.failure));
  }

 private:
  struct Job {
    int64_t count;
    int64_t grain;
    const Executor::Body* body;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure = nullptr;  // the first; written by the thread that set `failed`
  };

  // An exception of a body ends its thread's part and keeps the others from beginning new ranges.
  static void take_ranges(Job& job) noexcept {
    inside_body = true;
    try {
      while (!job.failed.load(std::memory_order_relaxed)) {
        const int64_t begin = job.next.fetch_add(job.grain, std::memory_order_relaxed);
        if (begin >= job.count) break;
        (*job.body)(begin, std::min(job.count, begin + job.grain));
      }
    } catch (...) {
      if (!job.failed.exchange(true, std::memory_order_relaxed))
        job.failure = std::current_exception();
    }
    inside_body = false;
  }

  void work() {
    uint64_t seen = 0;
    while (true) {
      for (int i = 0; i < kSpins && seq_.load(std::memory_order_acquire) == seen; ++i) relax();
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return seq_.load(std::memory_order_relaxed) != seen; });
      seen = seq_.load(std::memory_order_relaxed);
      if (stop_) return;
      if (job_ == nullptr) continue;  // closed before this thread woke
      Job& job = *job_;
      joined_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      take_ranges(job);
      lock.lock();
      if (joined_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
    }
  }

  std::mutex call_mutex_;  // one parallel_for at a time
  std::mutex mutex_;       // guards job_, stop_ and the changes of seq_ and joined_
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  bool stop_ = false;
  std::atomic<uint64_t> seq_{0};
  std::atomic<int> joined_{0};
  std::vector<std::thread> workers_;
};

// In a forked child the pool's threads do not exist, and threads that do not exist may hold its
// mutexes. None of it can be joined or destroyed. Everything then runs on the calling thread, and
// the pool is abandoned.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) : pool_(std::make_unique<Pool>(threads)) {}
  ~ThreadPool() override {
    if (fork_count() != made_in_) static_cast<void>(pool_.release());
  }
  int threads() const override { return fork_count() == made_in_ ? pool_->threads() : 1; }
  void parallel_for(int64_t count, int64_t grain, const Body& body) override {
    if (fork_count() != made_in_) return run_inline(count, std::max<int64_t>(grain, 1), body);
    pool_->parallel_for(count, grain, body);
  }

 private:
  const uint32_t made_in_ = fork_count();
  std::unique_ptr<Pool> pool_;
};

}  // namespace

std::unique_ptr<Executor> make_thread_pool(int threads) {
  return std::make_unique<ThreadPool>(threads <= 0 ? available_cores() : threads);
}

Executor& serial_executor() {
  static SerialExecutor executor;
  return executor;
}

}  // namespace nvfp4_moe::internal
