// The end of a communicator, on a thread of its own.
//
// NCCL's destroy and its abort come back when every CUDA graph that has captured the communicator is gone, and a graph may
// be dropped behind it, by the same thread or by one that needs a lock of that thread's: whoever called either by itself
// could wait for ever. Abort ends the kernels that run before it begins to wait.
#pragma once

#include <functional>
#include <memory>

#include "exchange/exchange.h"
#include "exchange/nccl_library.h"

namespace nvfp4_moe {

// Calls its argument with the communicator's device as the thread's current one. Empty: there are no devices.
using OnDevice = std::function<void(const std::function<void()>&)>;

// What has begun to end. May be dropped at any time, which waits for nothing.
class CommunicatorEnd {
 public:
  enum class How { kDestroy, kAbort };
  CommunicatorEnd() = default;
  // comm is NCCL's from here on.
  CommunicatorEnd(const NcclLibrary& nccl, NcclCommunicator comm, How how, const OnDevice& on_device);

  // Returns once it has ended, or `timeout` after it began. At once if nothing ends.
  void wait(Timeout timeout) const;

  // The most that anyone waits for an aborted communicator: on a busy machine a second may be too short for one that can end. What
  // waits at the process's exit counts from the same beginning, so that a rank is gone soon after its error.
  static constexpr Timeout kMost{3000};

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace nvfp4_moe
