// The threads are detached and counted. Process exit waits briefly for those that can end, so that
// they are not inside CUDA calls while CUDA shuts down. Two kinds cannot end: one whose graph is
// never dropped, and one that is destroyed while a peer is stopped. They sleep in NCCL.
#include "exchange/nccl_end.h"

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/fork.h"

namespace nvfp4_moe::internal {
namespace {

// Counts communicators that are ending, except those that a wait has given up on. Never destroyed,
// since process exit reads it.
struct Ending {
  std::mutex mutex;
  std::condition_variable fewer;
  int count = 0;  // guarded by mutex
  const uint32_t process = fork_count();

  static Ending& all() {
    static Ending& ending = *new Ending;
    static const int registered = std::atexit([] { all().wait(); });
    static_cast<void>(registered);
    return ending;
  }
  void add(int change) {
    const std::lock_guard lock(mutex);
    count += change;
    fewer.notify_all();
  }
  void wait() {
    if (fork_count() != process) return;  // the threads are the parent's
    std::unique_lock lock(mutex);
    fewer.wait_for(lock, CommunicatorEnd::kMost, [this] { return count == 0; });
  }
};

}  // namespace

struct CommunicatorEnd::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false, given_up = false;  // guarded by mutex
};

CommunicatorEnd::CommunicatorEnd(const NcclLibrary& nccl, NcclCommunicator comm, How how,
                                 const OnDevice& on_device)
    : state_(std::make_shared<State>()) {
  Ending::all().add(1);
  const auto end = [&nccl, comm, how, on_device, state = state_] {
    const auto call = [&] { how == How::kDestroy ? nccl.destroy(comm) : nccl.abort(comm); };
    on_device ? on_device(call) : call();
    const std::lock_guard lock(state->mutex);
    state->over = true;
    state->changed.notify_all();
    if (!state->given_up) Ending::all().add(-1);
  };
  try {
    std::thread(end).detach();
  } catch (const std::system_error&) {  // no thread available
    end();
  }
}

void CommunicatorEnd::wait(Timeout timeout) const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  if (state_->changed.wait_for(lock, timeout, [this] { return state_->over; })) return;
  // It has had kMost. Do not wait that long again at process exit.
  if (timeout < kMost || state_->given_up) return;
  state_->given_up = true;
  Ending::all().add(-1);
}

}  // namespace nvfp4_moe::internal
