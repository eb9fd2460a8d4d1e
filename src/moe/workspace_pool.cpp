#include "moe/workspace_pool.h"

#include <algorithm>
#include <utility>

namespace nvfp4_moe {

WorkspacePool::Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      stream_(other.stream_),
      capture_(other.capture_),
      buffer_(std::move(other.buffer_)) {}

WorkspacePool::Lease::~Lease() {
  if (pool_ == nullptr) return;
  const std::lock_guard lock(pool_->mutex_);
  pool_->free_.push_back({stream_, capture_, std::move(buffer_)});
}

Result<WorkspacePool::Lease> WorkspacePool::lease(size_t size_bytes, void* stream, uint64_t capture) {
  {
    Buffer outgrown;  // goes after the lock and before more is asked for
    const std::lock_guard lock(mutex_);
    auto found = free_.end();  // the largest of the stream
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->stream == stream && it->capture == capture &&
          (found == free_.end() || it->buffer.size_bytes() > found->buffer.size_bytes()))
        found = it;
    if (found != free_.end()) {
      Buffer buffer = std::move(found->buffer);
      *found = std::move(free_.back());
      free_.pop_back();
      if (buffer.size_bytes() >= size_bytes) return Lease(this, stream, capture, std::move(buffer));
      --workspaces_;
      if (capture != 0) {
        of_graphs_.push_back(std::move(buffer));
      } else {
        total_bytes_ -= buffer.size_bytes();
        outgrown = std::move(buffer);
      }
    }
  }
  NVFP4_MOE_ASSIGN(Buffer buffer, allocate_(std::max<size_t>(size_bytes, 1), stream));
  const std::lock_guard lock(mutex_);
  free_.reserve(++workspaces_);  // so that the end of a lease allocates nothing
  total_bytes_ += buffer.size_bytes();
  return Lease(this, stream, capture, std::move(buffer));
}

size_t WorkspacePool::release() {
  std::vector<Free> free;  // both go after the lock
  std::vector<Buffer> of_graphs;
  size_t released = 0;
  const std::lock_guard lock(mutex_);
  for (const Free& one : free_) released += one.buffer.size_bytes();
  for (const Buffer& one : of_graphs_) released += one.size_bytes();
  workspaces_ -= free_.size();
  total_bytes_ -= released;
  free.swap(free_);
  of_graphs.swap(of_graphs_);
  free_.reserve(workspaces_);  // so that the end of a lease allocates nothing
  return released;
}

size_t WorkspacePool::total_bytes() const {
  const std::lock_guard lock(mutex_);
  return total_bytes_;
}

}  // namespace nvfp4_moe
