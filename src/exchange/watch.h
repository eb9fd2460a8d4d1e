// Watches the work that a rank has enqueued on its device: a thread polls it. If the device reports
// a failure, or a rank has left or failed, the link between the devices ends. Only the first
// failure is kept. If only this rank knows of it, the exchange passes it on.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "core/fork.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

class Watch {
 public:
  using Lock = std::unique_lock<ForkMutex>;
  // Both are called under the watch's mutex, from any thread.
  struct Watched {
    std::function<Status()> poll;  // does not wait; not called again after a failure
    std::function<void(const Status& why)> fails;  // called once: ends the enqueued work
  };

  // Starts polling, every kInterval. The exchange must outlive it.
  Watch(Exchange& exchange, Watched watched);
  ~Watch() { end(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // After it returns no poll is in progress and none follows. In a forked child there is no thread
  // to wait for.
  void end();

  // For code that changes data that `poll` and `fails` read.
  Lock lock() { return Lock(mutex_); }
  // Call under the mutex. Ok if there is no failure.
  const Status& failure() const { return failure_; }
  // Call under the mutex, for a failure of this rank only. Returns the failure that is kept.
  const Status& fail(const Status& why);
  // Call under the mutex, which it releases: passes the failure on to the other ranks.
  Status fail_all(Lock& lock, const Status& why);

  static constexpr Timeout kInterval{50};

 private:
  void run();

  // A forked child can neither wait for this nor destroy it: the thread does not exist there, and
  // `changed` counts it as a waiter.
  struct Poller {
    std::condition_variable_any changed;
    std::thread thread;
  };

  Exchange& exchange_;
  const Watched watched_;
  const uint32_t process_ = fork_count();
  ForkMutex mutex_{ForkMutex::AtFork::kAbandoned};  // guards the members below
  Status failure_;
  bool ends_ = false;
  std::unique_ptr<Poller> poller_ = std::make_unique<Poller>();
};

}  // namespace nvfp4_moe::internal
