// A run of kAllToAll on a device, whatever connects the devices: DeviceDispatch over a library's calls, PeerDispatch over
// memory that all reach.
#pragma once

#include <cstddef>

#include "core/batch.h"
#include "exchange/exchange.h"

namespace nvfp4_moe {

class DeviceAllToAll {
 public:
  virtual ~DeviceAllToAll() = default;
  virtual size_t workspace_bytes(int64_t tokens) const = 0;
  // Enqueues what home does before the wire, where mine is Ok, and tells all ranks. Ok on all or on none.
  virtual Status begin(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream, Status mine) = 0;
  // Behind begin: enqueues the rest.
  virtual Status run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream) = 0;
  // What runs since the last call have found wrong. Waits for the stream.
  virtual Status report(void* stream) const = 0;
};

}  // namespace nvfp4_moe
