// Where the workspace of a run from Python comes from: the caller, torch's caching allocator, or
// memory of the library's own.
//
// Runs on torch's CUDA tensors take torch memory, so that torch counts it, and can lend it to
// others. Outside a capture one tensor a stream is kept and grows with the largest run; a hit costs
// a mutex and no Python. While a graph is captured each run takes a fresh one from the graph's own
// memory and gives it back at once: the next run of the capture gets the same bytes, as do captures
// that share the graph's pool, and they go with the graph. Everything else, host arrays included,
// takes library memory, kept by stream and by capture.
#pragma once

#include <cstddef>
#include <optional>

#include "backend/backend.h"
#include "moe/workspaces.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// The kept workspaces of one device.
struct Workspaces {
  Workspaces(const Backend& backend, int device);
  size_t release();  // WorkspacePool::release of both

  const DeviceMemory* memory;  // null on the host
  int device;
  WorkspacePool own;
  WorkspacePool torch;
};

// Held while a run is enqueued; on the host, while it computes. Empty at first: one of its two
// functions fills it, in place, since every call from Python does.
class RunWorkspace {
 public:
  RunWorkspace() = default;
  RunWorkspace(const RunWorkspace&) = delete;
  RunWorkspace& operator=(const RunWorkspace&) = delete;

  // Null if empty.
  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

  // The caller's array, checked: uint8, contiguous, writable, on the device, its size left to the
  // run.
  void use(const Tensor& array, const Device& device);
  // At least size_bytes for a run in the stream on arrays such as `like`. Needs no interpreter
  // lock.
  Status lease(Workspaces& workspaces, size_t size_bytes, const Tensor& like, void* stream);

 private:
  Status lease_from(WorkspacePool& pool, size_t size_bytes, void* stream, uint64_t capture = 0);

  void* data_ = nullptr;
  size_t size_bytes_ = 0;
  std::optional<WorkspacePool::Lease> lease_;
  std::optional<Buffer> fresh_;  // of torch's, during a capture
};

}  // namespace nvfp4_moe::internal::python
