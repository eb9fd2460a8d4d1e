#include "moe/workspaces.h"

#include <algorithm>
#include <mutex>

namespace nvfp4_moe::internal {

constinit std::array<WorkspaceClaim::Bucket, size_t{1} << WorkspaceClaim::kBucketBits>
    WorkspaceClaim::buckets_{};

Status WorkspaceClaim::busy() {
  return {Code::kBusy,
          "workspace: expected one that no other run is using, got one in use; give each thread "
          "and each stream its own"};
}

Result<WorkspacePool::Lease> WorkspacePool::lease(size_t size_bytes, void* stream,
                                                  uint64_t capture) {
  {
    // freed after the lock is released and before more memory is requested
    std::unique_ptr<Kept> outgrown;
    const std::lock_guard lock(mutex_);
    auto found = kept_.end();  // the largest free one of the stream
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      const Kept& kept = **it;
      if (!kept.is_free() || kept.outgrown || kept.stream != stream || kept.capture != capture)
        continue;
      if (found == kept_.end() || kept.buffer.size_bytes() > (*found)->buffer.size_bytes())
        found = it;
    }
    if (found != kept_.end()) {
      if ((*found)->buffer.size_bytes() >= size_bytes) {
        (*found)->lease();
        return Lease(found->get());
      }
      if (capture != 0) {
        (*found)->outgrown = true;
      } else {
        outgrown = std::move(*found);
        kept_.erase(found);
      }
    }
  }
  NVFP4_MOE_ASSIGN(Buffer buffer, allocate_(std::max<size_t>(size_bytes, 1), stream));
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::make_unique<Kept>(stream, capture, std::move(buffer)));
  Kept* const kept = kept_.back().get();
  kept->lease();
  return Lease(kept);
}

size_t WorkspacePool::release() {
  std::vector<std::unique_ptr<Kept>> free;  // freed after the lock is released
  size_t released = 0;
  const std::lock_guard lock(mutex_);
  free.reserve(kept_.size());  // before anything moves
  const auto first_free =
      std::stable_partition(kept_.begin(), kept_.end(),
                            [](const std::unique_ptr<Kept>& kept) { return !kept->is_free(); });
  for (auto it = first_free; it != kept_.end(); ++it) {
    released += (*it)->buffer.size_bytes();
    free.push_back(std::move(*it));
  }
  kept_.erase(first_free, kept_.end());
  return released;
}

}  // namespace nvfp4_moe::internal
