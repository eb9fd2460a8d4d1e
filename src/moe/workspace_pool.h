// Workspaces for hosts that do not bring their own: one per stream, shared by all layers of a device (F16).
//
// A lease is exclusive: while it lives no other lease gets the same bytes, so two threads that run layers at once get a
// workspace each. On a device whose work is ordered by the stream, a lease may end as soon as the run is enqueued: the
// next run in the same stream follows it. Host streams are all null. Any thread may call everything here.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "core/buffer.h"
#include "core/status.h"

namespace nvfp4_moe {

class WorkspacePool {
 public:
  using Allocate = Result<Buffer> (*)(size_t size_bytes);  // Backend::allocate
  explicit WorkspacePool(Allocate allocate) : allocate_(allocate) {}

  class Lease {
   public:
    Lease(Lease&& other) noexcept;
    ~Lease();
    void* data() const { return buffer_.data(); }
    size_t size_bytes() const { return buffer_.size_bytes(); }

   private:
    friend class WorkspacePool;
    Lease(WorkspacePool* pool, void* stream, Buffer buffer)
        : pool_(pool), stream_(stream), buffer_(std::move(buffer)) {}
    WorkspacePool* pool_;  // null once moved from
    void* stream_;
    Buffer buffer_;
  };

  // At least size_bytes. Allocates only where the stream has no free workspace that is large enough; a smaller free one
  // is then given back, so that a stream ends up with one workspace of the largest size.
  Result<Lease> lease(size_t size_bytes, void* stream = nullptr);
  // Bytes of all workspaces, leased or free.
  size_t total_bytes() const;

 private:
  struct Free {
    void* stream;
    Buffer buffer;
  };
  Allocate allocate_;
  mutable std::mutex mutex_;
  std::vector<Free> free_;
  size_t workspaces_ = 0;  // leased or free
  size_t total_bytes_ = 0;
};

}  // namespace nvfp4_moe
