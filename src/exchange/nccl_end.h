// The end of a communicator, on a thread of its own.
//
// NCCL's destroy and its abort come back when every CUDA graph that has captured the communicator
// is gone, and a graph may be dropped behind it, by the same thread or by one that needs a lock of
// that thread's: whoever called either by itself could wait for ever. Abort ends the kernels that
// run before it begins to wait.
#pragma once

#include <functional>
#include <memory>

#include "exchange/exchange.h"
#include "exchange/nccl_library.h"

namespace nvfp4_moe::internal {

// Calls its argument with the communicator's device as the thread's current one. Empty: there are
// no devices.
using OnDevice = std::function<void(const std::function<void()>&)>;

// A communicator that has begun to end. May be dropped at any time, which waits for nothing.
class CommunicatorEnd {
 public:
  enum class How { kDestroy, kAbort };
  CommunicatorEnd() = default;
  // comm is NCCL's from here on.
  CommunicatorEnd(const NcclLibrary& nccl, NcclCommunicator comm, How how,
                  const OnDevice& on_device);

  // Until it has ended, or the time is over. At once if nothing ends.
  void wait(Timeout timeout) const;

  // The most that the end of a failed exchange waits, and the process's exit for those that nobody
  // has waited for so long: on a busy machine a second may be too short for one that can end. A
  // rank is so gone within 5 s of its error.
  static constexpr Timeout kMost{3000};

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace nvfp4_moe::internal
