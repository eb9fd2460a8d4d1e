// Which workspaces host runs are computing in right now, so that two runs in one workspace are an error and no wrong
// numbers.
//
// A workspace's own bytes cannot tell, since nobody need have initialized them: the addresses of those in use stand in
// a table of the process. It is lock-free, two looks at a bucket of eight entries and one compare-and-swap: a run
// writes its address into a free entry of the address's own bucket, then looks whether another entry there has it too.
// Of runs that begin in one workspace at once at most one goes on. Where a bucket is full, eight workspaces in use at
// once whose addresses fall together, the next run is not watched.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/fork.h"
#include "core/status.h"

namespace nvfp4_moe {

class WorkspaceClaim {
 public:
  // workspace: a multiple of Arena::kAlignment; null claims nothing. false where another claim of it lives.
  explicit WorkspaceClaim(const void* workspace) {
    // The low bits, which the address leaves free, are the process's: what a forked child's parent claimed is no claim.
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
    return static_cast<size_t>((uint64_t{key} / Arena::kAlignment * 0x9E37'79B9'7F4A'7C15u) >> (64 - kBucketBits));
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

}  // namespace nvfp4_moe
