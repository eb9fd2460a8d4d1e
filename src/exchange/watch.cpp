#include "exchange/watch.h"

#include <utility>

namespace nvfp4_moe::internal {

Watch::Watch(Exchange& exchange, Watched watched)
    : exchange_(exchange), watched_(std::move(watched)) {
  poller_->thread = std::thread([this] { run(); });
}

void Watch::end() {
  if (process_ != fork_count()) {
    static_cast<void>(poller_.release());
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  poller_->changed.notify_all();
  if (poller_->thread.joinable()) poller_->thread.join();
}

const Status& Watch::fail(const Status& why) {
  if (why.ok() || !failure_.ok()) return failure_;
  failure_ = why;
  watched_.fails(why);
  return failure_;
}

Status Watch::fail_all(Lock& lock, const Status& why) {
  const Status failure = fail(why);
  lock.unlock();
  exchange_.abort(failure);
  return failure;
}

void Watch::run() {
  Lock lock(mutex_);
  while (!poller_->changed.wait_for(lock, kInterval, [this] { return ends_; })) {
    if (!failure_.ok()) return;
    if (const Status seen = watched_.poll(); !seen.ok()) {
      const Status failure = fail_all(lock, seen);
      static_cast<void>(failure);  // the next call returns it
      return;
    }
    // Poll without the mutex, so that a run that enqueues does not wait for the transport.
    lock.unlock();
    const Status others = exchange_.poll();
    lock.lock();
    if (!others.ok() && !ends_) fail(others);
  }
}

}  // namespace nvfp4_moe::internal
