// Workspaces for hosts that do not bring their own: one per stream, shared by all layers of a device.
//
// A lease is exclusive: while it lives no other lease gets the same bytes, so two threads that run layers at once get a
// workspace each. On a device whose work is ordered by the stream, a lease may end as soon as the run is enqueued: the
// next run in the same stream follows it. Host streams are all null. Any thread may call everything here.
//
// A graph uses its workspaces whenever it is replayed: what is leased while a stream is captured goes to runs of the
// same stream and capture alone, and is kept until release() or the pool's end, also where a larger one follows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "core/fork.h"
#include "core/status.h"

namespace nvfp4_moe {

class WorkspacePool {
 public:
  // Memory for work of that stream, 256-byte aligned. Called without a lock, as the end of a Buffer is.
  using Allocate = std::function<Result<Buffer>(size_t size_bytes, void* stream)>;
  explicit WorkspacePool(Allocate allocate) : allocate_(std::move(allocate)) {}

  class Lease;

  // At least size_bytes. Allocates only where the stream has no free workspace that is large enough; a smaller free one
  // is given back before, so that a stream ends up with one workspace of the largest size that its runs asked for.
  // capture: DeviceMemory's capture_id of the stream. A refused allocation leaves the pool usable.
  Result<Lease> lease(size_t size_bytes, void* stream = nullptr, uint64_t capture = 0);
  // Gives back every workspace that no lease holds, those of captures too, and says how many bytes they were. No graph
  // whose capture leased here may be replayed afterwards.
  size_t release();

 private:
  // Stays where it is while it is kept, so that a lease is a pointer and a flag.
  struct Kept {
    Kept(void* of_stream, uint64_t of_capture, Buffer bytes)
        : stream(of_stream), capture(of_capture), buffer(std::move(bytes)) {}
    void* stream;
    uint64_t capture;
    Buffer buffer;
    std::atomic<bool> leased = false;  // set under the lock, taken back without it
    uint32_t process = 0;              // core/fork.h's number, and the thread, of the last lease
    std::thread::id thread;
    bool outgrown = false;  // of a capture, which may be replayed

    void lease() {
      process = fork_count();
      thread = std::this_thread::get_id();
      leased.store(true, std::memory_order_relaxed);
    }
    // In a forked child the leases of the parent's other threads have ended.
    bool is_free() const {
      return !leased.load(std::memory_order_acquire) || (process != fork_count() && thread != forking_thread());
    }
  };
  Allocate allocate_;
  ForkMutex mutex_;
  std::vector<std::unique_ptr<Kept>> kept_;
};

class WorkspacePool::Lease {
 public:
  Lease(Lease&& other) noexcept : kept_(std::exchange(other.kept_, nullptr)) {}
  ~Lease() {
    if (kept_ != nullptr) kept_->leased.store(false, std::memory_order_release);
  }
  void* data() const { return kept_->buffer.data(); }
  size_t size_bytes() const { return kept_->buffer.size_bytes(); }

 private:
  friend class WorkspacePool;
  explicit Lease(Kept* kept) : kept_(kept) {}
  Kept* kept_;  // null once moved from
};

}  // namespace nvfp4_moe
