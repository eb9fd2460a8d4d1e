// Workspaces: their sizes, which host runs are computing in them, and a pool for hosts that do not
// bring their own.
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

// The workspace size that was asked for last, by its token count.
//
// A size is a walk over a layer's arrays, some 80 ns. A call asks for it twice (to lease, and to
// check what it got), and decoding asks for the same token count layer after layer and step after
// step.
class LastSize {
 public:
  // compute(tokens), or what it was. tokens: 0 to 2^31 - 1. Any thread may call.
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
  static constexpr int kSizeBits = 33;  // what is larger than 8 GiB is computed each time
  static constexpr uint64_t kMaxSize = (uint64_t{1} << kSizeBits) - 1;
  static constexpr uint64_t kNone = ~uint64_t{0};
  mutable std::atomic<uint64_t> last_{
      kNone};  // tokens and size in one word, so that both are of one call
};

// Which workspaces host runs are computing in right now, so that two runs in one workspace are an
// error and no wrong numbers.
//
// A workspace's own bytes cannot tell, since nobody need have initialized them: the addresses of
// those in use stand in a table of the process. It is lock-free, two reads of a bucket of eight
// entries and one compare-and-swap: a run writes its address into a free entry of the address's own
// bucket, then checks whether another entry there has it too. Of runs that begin in one workspace
// at once at most one goes on. If a bucket is full, eight workspaces in use at once whose addresses
// fall together, the next run is not watched.
class WorkspaceClaim {
 public:
  // workspace: a multiple of Arena::kAlignment; null claims nothing. false if another claim of it
  // lives.
  explicit WorkspaceClaim(const void* workspace) {
    // The low bits, which the address leaves free, are the process's: what a forked child's parent
    // claimed is no claim.
    const uintptr_t process = fork_count() % Arena::kAlignment;
    const uintptr_t key = reinterpret_cast<uintptr_t>(workspace) | process;
    if (workspace == nullptr) return;
    Bucket& bucket = buckets_[bucket_of(key)];
    for (Entry& entry : bucket.entries) {
      uintptr_t found = entry.load(std::memory_order_relaxed);
      const bool free = found == 0 || found % Arena::kAlignment != process;
      // Sequential order: of two claims that both write, one reads after the other has written.
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

  static Status busy();  // what a run says whose claim is false

 private:
  using Entry = std::atomic<uintptr_t>;  // 0, or an address and its process
  static constexpr size_t kBucketBits = 8;
  struct alignas(64) Bucket {
    std::array<Entry, 8> entries;
  };

  static size_t bucket_of(uintptr_t key) {
    return static_cast<size_t>((uint64_t{key} / Arena::kAlignment * 0x9E37'79B9'7F4A'7C15u) >>
                               (64 - kBucketBits));
  }
  void end() {
    // In a child that was forked meanwhile, the entry may be another run's by now.
    if (entry_ != nullptr && key_ % Arena::kAlignment == fork_count() % Arena::kAlignment)
      entry_->store(0, std::memory_order_release);
    entry_ = nullptr;
  }

  static std::array<Bucket, size_t{1} << kBucketBits> buckets_;
  Entry* entry_ = nullptr;
  uintptr_t key_ = 0;
  bool granted_ = true;
};

// Workspaces for hosts that do not bring their own: one per stream, shared by all layers of a
// device.
//
// A lease is exclusive: while it lives no other lease gets the same bytes, so two threads that run
// layers at once get a workspace each. On a device whose work is ordered by the stream, a lease may
// end as soon as the run is enqueued: the next run in the same stream follows it. Host streams are
// all null. Any thread may call everything here.
//
// A graph uses its workspaces whenever it is replayed: what is leased while a stream is captured
// goes to runs of the same stream and capture alone, and is kept until release() or the pool's end,
// also if a larger one follows.
class WorkspacePool {
 public:
  // Memory for work of that stream, 256-byte aligned. Called without a lock, as the end of a Buffer
  // is.
  using Allocate = std::function<Result<Buffer>(size_t size_bytes, void* stream)>;
  explicit WorkspacePool(Allocate allocate) : allocate_(std::move(allocate)) {}

  class Lease;

  // At least size_bytes. Allocates only if the stream has no free workspace that is large enough; a
  // smaller free one is given back before, so that a stream ends up with one workspace of the
  // largest size that its runs asked for. capture: DeviceMemory's capture_id of the stream. A
  // refused allocation leaves the pool usable.
  Result<Lease> lease(size_t size_bytes, void* stream = nullptr, uint64_t capture = 0);
  // Gives back every workspace that no lease holds, those of captures too, and says how many bytes
  // they were. No graph whose capture leased here may be replayed afterwards.
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
