// Ends a communicator on a separate thread.
//
// NCCL's destroy and abort return only after every CUDA graph that captured the communicator is
// gone. The calling thread may be the one that drops such a graph later, so it must not call them.
// Abort ends the running kernels before it starts to wait.
#pragma once

#include <functional>
#include <memory>

#include "exchange/exchange.h"
#include "exchange/nccl_library.h"

namespace nvfp4_moe::internal {

// Calls its argument with the communicator's device as the thread's current device. Empty: there
// are no devices.
using OnDevice = std::function<void(const std::function<void()>&)>;

// A communicator that is ending. Destroying this object does not wait.
class CommunicatorEnd {
 public:
  enum class How { kDestroy, kAbort };
  CommunicatorEnd() = default;
  // comm belongs to NCCL from here on.
  CommunicatorEnd(const NcclLibrary& nccl, NcclCommunicator comm, How how,
                  const OnDevice& on_device);

  // Waits until it has ended or the timeout passes. Returns immediately if nothing is ending.
  void wait(Timeout timeout) const;

  // The longest wait for the end of a failed exchange, and at process exit. On a busy machine one
  // second may be too short. With this value a rank exits within 5 s of its error.
  static constexpr Timeout kMost{3000};

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace nvfp4_moe::internal
