// The watch over what a rank has enqueued on its device: no call waits for it, so that a thread looks.
//
// What the device says, and ranks that are gone or have failed, end the link between the devices. The first failure is the one
// that stays. What only this rank sees goes to the other ranks by the exchange; what the exchange says they have heard.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "core/fork.h"
#include "exchange/exchange.h"

namespace nvfp4_moe {

class Watch {
 public:
  using Lock = std::unique_lock<ForkMutex>;
  // What is watched. Both are called under the watch's mutex, from any thread.
  struct Watched {
    std::function<Status()> look;                  // does not wait; no longer asked once anything has failed
    std::function<void(const Status& why)> fails;  // once, by the first failure: ends what is enqueued
  };

  // Looks from here on, every kInterval. The exchange outlives it.
  Watch(Exchange& exchange, Watched watched);
  ~Watch() { end(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // No look is under way when it returns, and none follows. In a forked child there is no thread to wait for.
  void end();

  // For whoever changes what `look` and `fails` read.
  Lock lock() { return Lock(mutex_); }
  // Under the mutex. Ok while there is none.
  const Status& failure() const { return failure_; }
  // Under the mutex: of this rank alone. What comes back is the failure that stays.
  const Status& fail(const Status& why);
  // Under the mutex, which it gives back: the other ranks hear of it too.
  Status fail_all(Lock& lock, const Status& why);

  static constexpr Timeout kInterval{50};

 private:
  void run();

  // What a forked child can neither wait for nor destroy: the thread is not there, and counts as one that waits.
  struct Looking {
    std::condition_variable_any changed;
    std::thread thread;
  };

  Exchange& exchange_;
  const Watched watched_;
  const uint32_t process_ = fork_count();
  ForkMutex mutex_{ForkMutex::AtFork::kAbandoned};  // guards what is below
  Status failure_;
  bool ends_ = false;
  std::unique_ptr<Looking> looking_ = std::make_unique<Looking>();
};

}  // namespace nvfp4_moe
