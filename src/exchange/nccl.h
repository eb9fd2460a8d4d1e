// Ranks on GPUs, over NCCL: bytes from device memory to device memory, in the order of a stream.
//
// A rank has an Exchange first: through it go NCCL's unique id, what ranks have to
// agree on, and the failures that NCCL itself does not report. No call here waits for a device, so
// that all of them can be captured into a graph; a thread of its own watches what has been
// enqueued.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "exchange/exchange.h"
#include "exchange/nccl_end.h"

namespace nvfp4_moe::internal {

// Events in streams, by which a watching thread polls how far the device is. It does not query the
// stream itself, which may be capturing by then, or destroyed.
struct StreamEvents {
  std::function<Status(void** event, void* stream)>
      set;  // *event: one that was reached, or null to make one
  std::function<Result<bool>(void* event)> reached;  // does not wait
  std::function<void(void* event)> drop;
};

// The word of DeviceTransport::failure_word.
struct FailureWord {
  uint32_t* word = nullptr;
  const uint32_t* on_device = nullptr;
};

struct NcclOptions {
  std::string library;  // path or name; empty: the process's own copy, else libnccl.so.2
  // An ncclComm_t of the caller's with the exchange's ranks, which stays the caller's: it is
  // neither aborted nor destroyed, so that what waits on the device for a rank that is gone waits
  // for the caller. null: one is made here, for the calling thread's current device.
  void* communicator = nullptr;
  // For the time that a rank may take on its device. Empty: nobody's is watched, only ranks that
  // are gone and NCCL's own errors.
  StreamEvents events;
  std::shared_ptr<const FailureWord>
      failure_word;    // null: kernels see no failure, and a graph's runs go on after it
  OnDevice on_device;  // for the threads that end a communicator made here
};

// Collective, as connect is. A rank whose NCCL is missing, too old or another version than rank 0's
// ends it on all, by name. The exchange lives longer than what comes back, whose end waits for no
// graph: the communicator ends after the last graph that has captured it.
Result<std::unique_ptr<DeviceTransport>> connect_nccl(Exchange& exchange,
                                                      const NcclOptions& options = {});

}  // namespace nvfp4_moe::internal
