// Workspaces for hosts that do not bring their own: one per stream, shared by all layers of a device.
//
// A lease is exclusive: while it lives no other lease gets the same bytes, so two threads that run layers at once get a
// workspace each. On a device whose work is ordered by the stream, a lease may end as soon as the run is enqueued: the
// next run in the same stream follows it. Host streams are all null. Any thread may call everything here.
//
// A graph uses its workspaces whenever it is replayed: what is leased while a stream is captured goes to runs of the
// same stream and capture alone, and is kept until release() or the pool's end, also where a larger one follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "core/buffer.h"
#include "core/status.h"

namespace nvfp4_moe {

class WorkspacePool {
 public:
  // Memory for work of that stream, 256-byte aligned. Called without a lock, as the end of a Buffer is.
  using Allocate = std::function<Result<Buffer>(size_t size_bytes, void* stream)>;
  explicit WorkspacePool(Allocate allocate) : allocate_(std::move(allocate)) {}

  class Lease {
   public:
    Lease(Lease&& other) noexcept;
    ~Lease();
    void* data() const { return buffer_.data(); }
    size_t size_bytes() const { return buffer_.size_bytes(); }

   private:
    friend class WorkspacePool;
    Lease(WorkspacePool* pool, void* stream, uint64_t capture, Buffer buffer)
        : pool_(pool), stream_(stream), capture_(capture), buffer_(std::move(buffer)) {}
    WorkspacePool* pool_;  // null once moved from
    void* stream_;
    uint64_t capture_;
    Buffer buffer_;
  };

  // At least size_bytes. Allocates only where the stream has no free workspace that is large enough; a smaller free one
  // is given back before, so that a stream ends up with one workspace of the largest size that its runs asked for.
  // capture: DeviceMemory's capture_id of the stream. A refused allocation leaves the pool usable.
  Result<Lease> lease(size_t size_bytes, void* stream = nullptr, uint64_t capture = 0);
  // Gives back every workspace that no lease holds, those of captures too, and says how many bytes they were. No graph
  // whose capture leased here may be replayed afterwards.
  size_t release();
  // Bytes of all workspaces, leased or free.
  size_t total_bytes() const;

 private:
  struct Free {
    void* stream;
    uint64_t capture;
    Buffer buffer;
  };
  Allocate allocate_;
  mutable std::mutex mutex_;
  std::vector<Free> free_;
  std::vector<Buffer> of_graphs_;  // outgrown ones
  size_t workspaces_ = 0;          // leased or free
  size_t total_bytes_ = 0;
};

}  // namespace nvfp4_moe
