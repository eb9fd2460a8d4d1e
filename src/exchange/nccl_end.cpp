// The threads are detached and counted. The process's exit waits a little for those that can end, so that they are not in the
// middle of CUDA's calls while CUDA is taken down. Two cannot: one whose graph is never dropped, and one whose peer is stopped
// (NCCL's proxy thread waits until the peer closes its connection). They sleep in NCCL until the process is gone.
#include "exchange/nccl_end.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/fork.h"

namespace nvfp4_moe {
namespace {

using Clock = std::chrono::steady_clock;

// How many communicators are ending. Lives as long as the process, whose exit asks it.
struct Ending {
  std::mutex mutex;
  std::condition_variable fewer;
  int count = 0;             // guarded by mutex
  Clock::time_point latest;  // when the last one began; likewise
  const uint32_t process = fork_count();

  static Ending& all() {
    static Ending& ending = *new Ending;
    static const int registered = std::atexit([] { all().wait(); });
    static_cast<void>(registered);
    return ending;
  }
  void begin() {
    const std::lock_guard lock(mutex);
    ++count;
    latest = Clock::now();
  }
  void end() {
    const std::lock_guard lock(mutex);
    --count;
    fewer.notify_all();
  }
  void wait() {
    if (fork_count() != process) return;  // the threads are the parent's
    std::unique_lock lock(mutex);
    fewer.wait_until(lock, latest + CommunicatorEnd::kMost, [this] { return count == 0; });
  }
};

}  // namespace

struct CommunicatorEnd::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;  // guarded by mutex
  const Clock::time_point begin = Clock::now();
};

CommunicatorEnd::CommunicatorEnd(const NcclLibrary& nccl, NcclCommunicator comm, How how, const OnDevice& on_device)
    : state_(std::make_shared<State>()) {
  Ending::all().begin();
  const auto end = [&nccl, comm, how, on_device, state = state_] {
    const auto call = [&] { how == How::kDestroy ? nccl.destroy(comm) : nccl.abort(comm); };
    on_device ? on_device(call) : call();
    {
      const std::lock_guard lock(state->mutex);
      state->over = true;
      state->changed.notify_all();
    }
    Ending::all().end();
  };
  try {
    std::thread(end).detach();
  } catch (const std::system_error&) {  // no thread to spare
    end();
  }
}

void CommunicatorEnd::wait(Timeout timeout) const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_until(lock, state_->begin + timeout, [this] { return state_->over; });
}

}  // namespace nvfp4_moe
