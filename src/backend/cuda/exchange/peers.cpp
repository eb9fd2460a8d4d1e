// Memory that several ranks' devices share, and the table of the peer kernels.
#include "backend/cuda/exchange/peers.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/mapped_host.h"
#include "backend/cuda/device/outside_captures.h"

namespace nvfp4_moe::internal::cuda {
namespace {

class CudaPeerDevice : public PeerDevice {
 public:
  explicit CudaPeerDevice(int device) : device_(device) {}

  int index() const override { return device_; }

  Result<std::string> pci_address() override {
    char address[32] = {};
    NVFP4_MOE_TRY(
        check(cudaDeviceGetPCIBusId(address, sizeof(address), device_), "cudaDeviceGetPCIBusId"));
    return std::string(address);
  }

  Result<PeerReach> reach(const std::string& pci_address) override {
    int other = -1;
    if (cudaDeviceGetByPCIBusId(&other, pci_address.c_str()) != cudaSuccess) {
      cudaGetLastError();
      return PeerReach::kNotVisible;
    }
    if (other == device_) return PeerReach::kYes;  // CUDA does not consider a device its own peer
    int can = 0;
    NVFP4_MOE_TRY(check(cudaDeviceCanAccessPeer(&can, device_, other), "cudaDeviceCanAccessPeer"));
    return can != 0 ? PeerReach::kYes : PeerReach::kNoAccess;
  }

  Result<Buffer> allocate_zeros(int64_t size_bytes) override {
    const auto size = static_cast<size_t>(size_bytes);
    NVFP4_MOE_ASSIGN(Buffer memory, allocate(size, device_, "memory for other ranks"));
    NVFP4_MOE_TRY(in_own_stream("cudaMemsetAsync", [&](cudaStream_t stream) {
      return cudaMemsetAsync(memory.data(), 0, size, stream);
    }));
    return memory;
  }

  Result<PeerHandle> share(void* memory) override {
    const DeviceGuard guard(device_);
    NVFP4_MOE_TRY(guard.status());
    cudaIpcMemHandle_t made;
    NVFP4_MOE_TRY(check(cudaIpcGetMemHandle(&made, memory), "cudaIpcGetMemHandle"));
    return std::bit_cast<PeerHandle>(made);
  }

  Result<void*> open(const PeerHandle& handle) override {
    const DeviceGuard guard(device_);
    NVFP4_MOE_TRY(guard.status());
    void* memory = nullptr;
    NVFP4_MOE_TRY(check(cudaIpcOpenMemHandle(&memory, std::bit_cast<cudaIpcMemHandle_t>(handle),
                                             cudaIpcMemLazyEnablePeerAccess),
                        "cudaIpcOpenMemHandle"));
    return memory;
  }

  void close(void* memory) override {
    const DeviceGuard guard(device_);
    cudaIpcCloseMemHandle(memory);
  }

  Status synchronize() override { return cuda::synchronize(device_); }

  Status stop(PeerControl* control) override {
    static const uint32_t yes = 1;
    return in_own_stream("cudaMemcpyAsync", [&](cudaStream_t stream) {
      return cudaMemcpyAsync(&control->stop, &yes, sizeof(yes), cudaMemcpyHostToDevice, stream);
    });
  }

  Result<PeerControl> control(const PeerControl* control) override {
    PeerControl seen;
    NVFP4_MOE_TRY(in_own_stream("cudaMemcpyAsync", [&](cudaStream_t stream) {
      return cudaMemcpyAsync(&seen, control, sizeof(seen), cudaMemcpyDeviceToHost, stream);
    }));
    return seen;
  }

  Status enable(int other) override {
    if (device_ == other) return {};
    // A second call is a harmless CUDA error, but tools report it.
    static std::mutex mutex;
    static std::set<std::pair<int, int>> enabled;
    const std::lock_guard lock(mutex);
    if (enabled.count({device_, other}) != 0) return {};
    const DeviceGuard guard(device_);
    NVFP4_MOE_TRY(guard.status());
    const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();  // by other code in this process
    else
      NVFP4_MOE_TRY(
          check(error, ("cudaDeviceEnablePeerAccess to cuda:" + std::to_string(other)).c_str()));
    enabled.insert({device_, other});
    return {};
  }

  Result<HostWords> make_host_words() override {
    HostWords made;
    NVFP4_MOE_TRY(make_mapped_host(device_, &made.words, &made.on_device));
    return made;
  }
  void drop_host_words(const HostWords& made) override { drop_mapped_host(device_, made.words); }

 private:
  // Enqueues in a new stream, since the default stream synchronizes with others.
  template <class Enqueue>
  Status in_own_stream(const char* name, const Enqueue& enqueue) {
    const DeviceGuard guard(device_);
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

  const int device_;
};

std::unique_ptr<PeerDevice> make_device(int device) {
  return std::make_unique<CudaPeerDevice>(device);
}

constexpr DevicePeers kPeers = {make_device,  pushes_tokens, push_tokens, assign_rows,
                                push_packets, push_rows,     sum_small,   sum_large};

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DevicePeers kCudaPeers = cuda::kPeers;
}
