#include "workspaces.h"

#include <atomic>

#include "torch_memory.h"

namespace nvfp4_moe::internal::python {

namespace {

// cudaStreamPerThread: one handle that means a different stream in each thread.
void* const kPerThreadStream = reinterpret_cast<void*>(2);

// The key of a stream in a pool: different for any two streams whose work may overlap. Per-thread
// streams get odd numbers, which are never a stream's address, except 1, the legacy stream's
// handle.
void* key_of(void* stream) {
  if (stream != kPerThreadStream) return stream;
  static std::atomic<uintptr_t> threads{0};
  thread_local const uintptr_t thread = ++threads;
  return reinterpret_cast<void*>(2 * thread + 1);
}

}  // namespace

Workspaces::Workspaces(const Backend& backend, int device_index)
    : memory(backend.memory),
      device(device_index),
      own([allocate = backend.allocate, device_index](size_t size_bytes, void*) {
        return allocate(size_bytes, device_index, "workspace");
      }),
      torch([device_index](size_t size_bytes, void* stream) {
        return torch_kept(size_bytes, device_index, stream);
      }) {}

size_t Workspaces::release() { return own.release() + torch.release(); }

void RunWorkspace::use(const Tensor& array, const Device& device) {
  size_t size_bytes = 1;
  for (int32_t i = 0; i < array.ndim(); ++i) size_bytes *= static_cast<size_t>(array.shape(i));
  if (!array.is_u8() || array.device() != device || !array.is_contiguous())
    array.fail_expected("(bytes,) uint8 on " + to_string(device) + ", contiguous");
  array.check_writable();
  data_ = array.data();
  size_bytes_ = size_bytes;
}

Status RunWorkspace::lease_from(WorkspacePool& pool, size_t size_bytes, void* stream,
                                uint64_t capture) {
  auto lease = pool.lease(size_bytes, stream, capture);
  if (!lease.ok()) return lease.status();
  lease_.emplace(std::move(*lease));
  data_ = lease_->data();
  size_bytes_ = lease_->size_bytes();
  return {};
}

Status RunWorkspace::lease(Workspaces& workspaces, size_t size_bytes, const Tensor& like,
                           void* stream) {
  if (workspaces.memory == nullptr) return lease_from(workspaces.own, size_bytes, nullptr);
  NVFP4_MOE_ASSIGN(const uint64_t capture, workspaces.memory->capture_id(stream));
  // torch's allocator treats the per-thread streams of all threads as one stream.
  if (!like.is_torch() || stream == kPerThreadStream)
    return lease_from(workspaces.own, size_bytes, key_of(stream), capture);
  if (capture == 0) return lease_from(workspaces.torch, size_bytes, stream);
  NVFP4_MOE_ASSIGN(fresh_, torch_captured(*like.exchange(), size_bytes, workspaces.device, stream));
  data_ = fresh_->data();
  size_bytes_ = fresh_->size_bytes();
  return {};
}

}  // namespace nvfp4_moe::internal::python
