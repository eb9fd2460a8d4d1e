// Watches what a rank has enqueued on its device. No call waits for that work, so a thread polls.
//
// A failure that the device reports, or a rank that has left or failed, ends the link between the
// devices. The first failure is the one that stays. The exchange passes on a failure that only this
// rank knows.
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
  // The poll and the end of the watched work. Both are called under the watch's mutex, from any
  // thread.
  struct Watched {
    std::function<Status()> poll;  // does not wait; not called again after a failure
    std::function<void(const Status& why)>
        fails;  // once, by the first failure: ends what is enqueued
  };

  // Polls from here on, every kInterval. The exchange outlives it.
  Watch(Exchange& exchange, Watched watched);
  ~Watch() { end(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // No poll is in progress when it returns, and none follows. In a forked child there is no thread
  // to wait for.
  void end();

  // For code that changes what `poll` and `fails` read.
  Lock lock() { return Lock(mutex_); }
  // Under the mutex. Ok while there is none.
  const Status& failure() const { return failure_; }
  // Under the mutex: of this rank alone. What comes back is the failure that stays.
  const Status& fail(const Status& why);
  // Under the mutex, which it gives back: passes the failure on to the other ranks.
  Status fail_all(Lock& lock, const Status& why);

  static constexpr Timeout kInterval{50};

 private:
  void run();

  // A forked child can neither wait for this nor destroy it: the thread does not exist there, and
  // `changed` counts it as waiting.
  struct Poller {
    std::condition_variable_any changed;
    std::thread thread;
  };

  Exchange& exchange_;
  const Watched watched_;
  const uint32_t process_ = fork_count();
  ForkMutex mutex_{ForkMutex::AtFork::kAbandoned};  // guards what is below
  Status failure_;
  bool ends_ = false;
  std::unique_ptr<Poller> poller_ = std::make_unique<Poller>();
};

}  // namespace nvfp4_moe::internal
