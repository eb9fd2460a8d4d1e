// Workspaces: their sizes, detection of concurrent host runs in one workspace, and a pool for
// callers that do not provide their own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/buffer.h"
#include "core/fork.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Caches the last workspace size by its token count.
//
// Computing a size walks over a layer's arrays, which takes about 80 ns. A call needs the size
// twice (to lease, and to check), and decoding uses the same token count in layer after layer and
// step after step.
class WorkspaceSizeCache {
 public:
  // compute(tokens), or its cached result. tokens: 0 to 2^31 - 1. Any thread may call it.
  template <class Compute>
  size_t get(int64_t tokens, Compute&& compute) const {
    const uint64_t last = last_.load(std::memory_order_relaxed);
    const uint64_t key = static_cast<uint64_t>(tokens) << kSizeBits;
    if (last != kNone && last - key <= kMaxSize) return static_cast<size_t>(last - key);
    const size_t size_bytes = compute(tokens);
    if (size_bytes <= kMaxSize) last_.store(key | size_bytes, std::memory_order_relaxed);
    return size_bytes;
  }

 private:
  static constexpr int kSizeBits = 33;  // larger sizes than 8 GiB are not cached
  static constexpr uint64_t kMaxSize = (uint64_t{1} << kSizeBits) - 1;
  static constexpr uint64_t kNone = ~uint64_t{0};
  mutable std::atomic<uint64_t> last_{
      kNone};  // tokens and size in one word, so that both are from one call
};

// Detects two concurrent host runs in one workspace, which would give wrong numbers; one of them
// gets an error instead.
//
// The flag cannot be in the workspace itself, which may be uninitialized. Instead a table of the
// process holds the addresses in use. It is lock-free: two reads of a bucket of eight entries and
// one compare-and-swap. A run writes its address into a free entry of the address's bucket, then
// checks whether another entry of the bucket holds the same address. Of several runs that start in
// one workspace at the same time, at most one continues. If a bucket is full (eight workspaces in
// use whose addresses hash to it), the next run is not checked.
class WorkspaceClaim {
 public:
  // workspace: aligned to Arena::kAlignment; null claims nothing. false if another claim of the
  // same workspace exists.
  explicit WorkspaceClaim(const void* workspace) {
    // Alignment leaves the low bits of the address free for the process number, so that claims of a
    // forked child's parent do not count.
    const uintptr_t process = fork_count() % Arena::kAlignment;
    const uintptr_t key = reinterpret_cast<uintptr_t>(workspace) | process;
    if (workspace == nullptr) return;
    Bucket& bucket = buckets_[bucket_of(key)];
    for (Entry& entry : bucket.entries) {
      uintptr_t found = entry.load(std::memory_order_relaxed);
      const bool free = found == 0 || found % Arena::kAlignment != process;
      // Sequential consistency: of two claims that both write, at least one sees the other's write.
      if (!free || !entry.compare_exchange_strong(found, key, std::memory_order_seq_cst)) continue;
      entry_ = &entry;
      key_ = key;
      break;
    }
    for (const Entry& entry : bucket.entries) {
      if (&entry == entry_ || entry.load(std::memory_order_seq_cst) != key) continue;
      end();
      granted_ = false;
      return;
    }
  }
  ~WorkspaceClaim() { end(); }
  WorkspaceClaim(const WorkspaceClaim&) = delete;
  WorkspaceClaim& operator=(const WorkspaceClaim&) = delete;
  explicit operator bool() const { return granted_; }

  static Status busy();  // the status of a run whose claim is false

 private:
  using Entry = std::atomic<uintptr_t>;  // 0, or an address combined with its process number
  static constexpr size_t kBucketBits = 8;
  struct alignas(64) Bucket {
    std::array<Entry, 8> entries;
  };

  static size_t bucket_of(uintptr_t key) {
    return static_cast<size_t>((uint64_t{key} / Arena::kAlignment * 0x9E37'79B9'7F4A'7C15u) >>
                               (64 - kBucketBits));
  }
  void end() {
    // In a child that was forked meanwhile, the entry may belong to another run by now.
    if (entry_ != nullptr && key_ % Arena::kAlignment == fork_count() % Arena::kAlignment)
      entry_->store(0, std::memory_order_release);
    entry_ = nullptr;
  }

  static std::array<Bucket, size_t{1} << kBucketBits> buckets_;
  Entry* entry_ = nullptr;
  uintptr_t key_ = 0;
  bool granted_ = true;
};

// Workspaces for callers that do not provide their own: one per stream, shared by all layers of a
// device.
//
// A lease is exclusive: no other lease gets the same bytes while it exists, so two threads that run
// layers at once get different workspaces. If the stream orders a device's work, a lease may end as
// soon as the run is enqueued: the next run in the same stream follows it. Host streams are all
// null. All functions are thread-safe.
//
// A graph uses its workspaces in every replay. A workspace that is leased while a stream is
// captured is reused only by runs of the same stream and capture, and is kept until release() or
// the pool's destruction, even if a larger one replaces it.
class WorkspacePool {
 public:
  // Memory for work in that stream, 256-byte aligned. Called without a lock, as is the destructor
  // of a Buffer.
  using Allocate = std::function<Result<Buffer>(size_t size_bytes, void* stream)>;
  explicit WorkspacePool(Allocate allocate) : allocate_(std::move(allocate)) {}

  class Lease;

  // At least size_bytes. Allocates only if the stream has no free workspace that is large enough.
  // It frees a smaller one first, so that a stream ends up with one workspace of the largest size
  // that its runs requested. capture: DeviceMemory's capture_id of the stream. After a failed
  // allocation the pool stays usable.
  Result<Lease> lease(size_t size_bytes, void* stream = nullptr, uint64_t capture = 0);
  // Frees every workspace that no lease holds, including those of captures, and returns the number
  // of bytes. Graphs whose capture leased one must not be replayed afterwards.
  size_t release();

 private:
  // Has a stable address, so that a lease is a pointer and a flag.
  struct Kept {
    Kept(void* of_stream, uint64_t of_capture, Buffer bytes)
        : stream(of_stream), capture(of_capture), buffer(std::move(bytes)) {}
    void* stream;
    uint64_t capture;
    Buffer buffer;
    std::atomic<bool> leased = false;  // set under the lock, cleared without it
    uint32_t process = 0;  // core/fork.h's process number, and the thread, of the last lease
    std::thread::id thread;
    bool outgrown = false;  // belongs to a capture, which may be replayed

    void lease() {
      process = fork_count();
      thread = std::this_thread::get_id();
      leased.store(true, std::memory_order_relaxed);
    }
    // In a forked child the leases of the parent's other threads have ended.
    bool is_free() const {
      return !leased.load(std::memory_order_acquire) ||
             (process != fork_count() && thread != forking_thread());
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

}  // namespace nvfp4_moe::internal
