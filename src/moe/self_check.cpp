#include "moe/self_check.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "moe/self_check_session.h"

namespace nvfp4_moe::internal {
namespace {

// The longest time for which a caller waits for memory that the check frees.
constexpr std::chrono::milliseconds kTimeToFree{200};
// Added to the message if no kernel has ended.
constexpr const char* kMayBeLoading =
    ", nor did its first kernel: CUDA may still load kernels, or wait for other work of the device";

// State that the caller's thread and the check's own share.
struct SharedCheck {
  std::mutex mutex;
  std::condition_variable changed;
  std::string kernel;  // the one that runs
  std::optional<CheckOutcome> outcome;
  bool ended = false;  // the thread has released the device's memory
};

void check_in_thread(const std::shared_ptr<SharedCheck>& shared, const CheckScope& scope,
                     const DeviceFacts& device, CheckSession::Clock::time_point deadline) {
  std::unique_ptr<CheckSession> session;
  CheckOutcome outcome;
  try {
    const auto begins = [shared](const std::string& kernel) {
      const std::lock_guard lock(shared->mutex);
      shared->kernel = kernel;
    };
    session = std::make_unique<CheckSession>(scope, device, deadline, begins);
    outcome = session->run();
  } catch (...) {
    outcome.verdict = CheckOutcome::Verdict::kError;
    outcome.difference = caught_exception().message();
  }
  {
    const std::lock_guard lock(shared->mutex);
    shared->outcome = outcome;
  }
  shared->changed.notify_all();
  // Memory that a hanging kernel uses stays allocated: freeing it would wait for the kernel.
  if (outcome.verdict == CheckOutcome::Verdict::kTimedOut)
    static_cast<void>(session.release());
  else
    session.reset();
  const std::lock_guard lock(shared->mutex);
  shared->ended = true;
  shared->changed.notify_all();
}

}  // namespace

CheckScope CheckScope::of(const Backend& backend, const MoeConfig& config) {
  return {&backend, config->activation_format, config->activation, config->batch_invariant};
}

std::string CheckScope::name() const {
  return std::string(backend->name) + " " + to_string(format) + " " + to_string(activation) +
         (batch_invariant ? " batch_invariant" : "");
}

CheckOutcome run_self_check(const CheckScope& scope, const DeviceFacts& device,
                            std::chrono::milliseconds limit) {
  using Verdict = CheckOutcome::Verdict;
  const auto start = CheckSession::Clock::now(), deadline = start + limit;
  const auto shared = std::make_shared<SharedCheck>();
  CheckOutcome outcome;
  std::thread thread;
  try {
    thread = std::thread(check_in_thread, shared, scope, device, deadline);
  } catch (const std::system_error& error) {
    outcome.verdict = Verdict::kError;
    outcome.difference = std::string("no thread for the self-check: ") + error.what();
    return outcome;
  }
  std::unique_lock lock(shared->mutex);
  shared->changed.wait_until(lock, deadline, [&] { return shared->outcome.has_value(); });
  // On a device without a memory pool, freeing waits for all work, which may be a caller's own.
  shared->changed.wait_for(lock, kTimeToFree, [&] { return shared->ended; });
  if (shared->outcome.has_value()) {
    outcome = *shared->outcome;
  } else {
    outcome.verdict = Verdict::kTimedOut;
    outcome.kernel = shared->kernel;
  }
  if (outcome.verdict == Verdict::kTimedOut)
    outcome.difference = "it did not end within " + std::to_string(limit.count()) + " ms" +
                         (outcome.kernel.empty() ? kMayBeLoading : "");
  const bool ended = shared->ended;
  lock.unlock();
  if (ended)
    thread.join();
  else
    thread.detach();
  outcome.milliseconds =
      std::chrono::duration<double, std::milli>(CheckSession::Clock::now() - start).count();
  return outcome;
}

}  // namespace nvfp4_moe::internal
