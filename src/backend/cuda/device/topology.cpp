#include <cuda_runtime_api.h>

#include "backend/cuda/device/check.h"
#include "backend/device_peers.h"

namespace nvfp4_moe::internal::cuda {
namespace {

Result<std::string> pci_address(int device) {
  char address[32] = {};
  NVFP4_MOE_TRY(
      check(cudaDeviceGetPCIBusId(address, sizeof(address), device), "cudaDeviceGetPCIBusId"));
  return std::string(address);
}

Result<PeerReach> reach(int device, const std::string& pci_address) {
  int other = -1;
  if (cudaDeviceGetByPCIBusId(&other, pci_address.c_str()) != cudaSuccess) {
    cudaGetLastError();
    return PeerReach::kNotVisible;
  }
  if (other == device) return PeerReach::kYes;  // CUDA does not consider a device its own peer
  int can = 0;
  NVFP4_MOE_TRY(check(cudaDeviceCanAccessPeer(&can, device, other), "cudaDeviceCanAccessPeer"));
  return can != 0 ? PeerReach::kYes : PeerReach::kNoAccess;
}

constexpr DeviceTopology kTopology = {pci_address, reach};

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DeviceTopology kCudaTopology = cuda::kTopology;
}
