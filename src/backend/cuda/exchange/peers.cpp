// Memory that several ranks' devices share, and the table of the peer kernels.
#include "backend/cuda/exchange/peers.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/mapped_host.h"
#include "backend/cuda/device/outside_captures.h"

namespace nvfp4_moe::internal::cuda {
namespace {

// Enqueues in a new stream, since the default stream synchronizes with others.
template <class Enqueue>
Status in_own_stream(int device, const char* name, const Enqueue& enqueue) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  cudaStream_t stream = nullptr;
  NVFP4_MOE_TRY(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                      "cudaStreamCreateWithFlags"));
  cudaError_t error = enqueue(stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return check(error, name);
}

Status clear(int device, void* memory, int64_t size_bytes) {
  return in_own_stream(device, "cudaMemsetAsync", [&](cudaStream_t stream) {
    return cudaMemsetAsync(memory, 0, static_cast<size_t>(size_bytes), stream);
  });
}

Status stop(int device, PeerControl* control) {
  static const uint32_t yes = 1;
  return in_own_stream(device, "cudaMemcpyAsync", [&](cudaStream_t stream) {
    return cudaMemcpyAsync(&control->stop, &yes, sizeof(yes), cudaMemcpyHostToDevice, stream);
  });
}

Status read(int device, const PeerControl* control, PeerControl* to) {
  return in_own_stream(device, "cudaMemcpyAsync", [&](cudaStream_t stream) {
    return cudaMemcpyAsync(to, control, sizeof(*to), cudaMemcpyDeviceToHost, stream);
  });
}

Status share(int device, void* memory, PeerHandle* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(PeerHandle));
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  cudaIpcMemHandle_t made;
  NVFP4_MOE_TRY(check(cudaIpcGetMemHandle(&made, memory), "cudaIpcGetMemHandle"));
  std::memcpy(handle->bytes, &made, sizeof(made));
  return {};
}

Result<void*> open(int device, const PeerHandle& handle) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle.bytes, sizeof(given));
  void* memory = nullptr;
  NVFP4_MOE_TRY(check(cudaIpcOpenMemHandle(&memory, given, cudaIpcMemLazyEnablePeerAccess),
                      "cudaIpcOpenMemHandle"));
  return memory;
}

void close(int device, void* memory) {
  const DeviceGuard guard(device);
  cudaIpcCloseMemHandle(memory);
}

Status reach(int device, int other) {
  if (device == other) return {};
  // A second call is a harmless CUDA error, but tools report it.
  static std::mutex mutex;
  static std::set<std::pair<int, int>> reached;
  const std::lock_guard lock(mutex);
  if (reached.count({device, other}) != 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();  // by other code in this process
  else
    NVFP4_MOE_TRY(
        check(error, ("cudaDeviceEnablePeerAccess to cuda:" + std::to_string(other)).c_str()));
  reached.insert({device, other});
  return {};
}

void drop_host_words(int device, PeerHostWords* words) { drop_mapped_host(device, words); }

constexpr DevicePeers kPeers = {clear,
                                stop,
                                read,
                                share,
                                open,
                                close,
                                reach,
                                make_mapped_host<PeerHostWords>,
                                drop_host_words,
                                barrier,
                                pushes_tokens,
                                push_tokens,
                                assign_rows,
                                push_packets,
                                push_rows,
                                sum_small,
                                push_parts,
                                sum_shard,
                                take_totals};

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DevicePeers kCudaPeers = cuda::kPeers;
}
