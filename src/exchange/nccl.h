// Ranks on GPUs over NCCL: moves bytes between device memories, in stream order.
//
// The Exchange carries NCCL's unique id, the facts that ranks must agree on, and failures that NCCL
// does not report. No call waits for a device, so all can be captured. A thread watches the work.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "exchange/exchange.h"
#include "exchange/nccl_end.h"

namespace nvfp4_moe::internal {

// Events in streams, which the watch thread polls. It does not query the stream itself, which may
// be capturing or destroyed by then.
struct StreamEvents {
  // *event: an event to reuse, already reached, or null to make one
  std::function<Status(void** event, void* stream)> set;
  std::function<Result<bool>(void* event)> reached;  // does not wait
  std::function<void(void* event)> drop;
};

// See DeviceTransport::failure_word.
struct FailureWord {
  uint32_t* word = nullptr;
  const uint32_t* on_device = nullptr;
};

struct NcclOptions {
  std::string library;  // path or name; empty: the process's own copy, otherwise libnccl.so.2
  // An ncclComm_t of the caller, who keeps ownership: it is neither aborted nor destroyed here.
  // null: a communicator is made for the calling thread's current device.
  void* communicator = nullptr;
  // Limit the time that a rank may take on its device. Empty: only ranks that are gone and NCCL's
  // own errors are detected.
  StreamEvents events;
  std::shared_ptr<const FailureWord> failure_word;  // null: kernels see no failure
  OnDevice on_device;                               // for threads that end a communicator made here
};

// Collective. If a rank's NCCL is missing, too old or of another version than rank 0's, all ranks
// fail with a message that names it. The exchange must outlive the result, and the communicator
// ends after the last graph that captured it.
Result<std::unique_ptr<DeviceTransport>> connect_nccl(Exchange& exchange,
                                                      const NcclOptions& options = {});

}  // namespace nvfp4_moe::internal
