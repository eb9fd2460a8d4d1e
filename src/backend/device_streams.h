// A stream for a thread that must neither wait for the work of other streams nor disturb their
// captures, and must notice that its own work does not end.
#pragma once

#include "core/status.h"

namespace nvfp4_moe::internal {

struct DeviceStreams {
  // Makes `device` current for the calling thread, which then disturbs no capture for as long as it
  // lives, and returns a stream that does not synchronize with the default stream. Freeing memory
  // that the thread allocates does not wait either if the device has a memory pool; it must be
  // freed before the stream is closed.
  Result<void*> (*open)(int device);
  // Whether all work of the stream has ended; the device's error if it failed. Never waits.
  Result<bool> (*has_ended)(void* stream);
  // The stream's work has ended. Called by the thread that opened it.
  void (*close)(void* stream);
};

// in builds with NVFP4_MOE_WITH_CUDA; all CUDA backends share it
extern const DeviceStreams kCudaStreams;

}  // namespace nvfp4_moe::internal
