#include <cuda_runtime_api.h>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/device.h"
#include "backend/device_streams.h"

namespace nvfp4_moe::internal::cuda {
namespace {

Result<void*> open(int device) {
  NVFP4_MOE_TRY(check(cudaSetDevice(device), "cudaSetDevice"));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  NVFP4_MOE_TRY(
      check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode"));
  cudaStream_t stream = nullptr;
  NVFP4_MOE_TRY(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                      "cudaStreamCreateWithFlags"));
  int has_pool = 0;
  NVFP4_MOE_TRY(check(cudaDeviceGetAttribute(&has_pool, cudaDevAttrMemoryPoolsSupported, device),
                      "cudaDevAttrMemoryPoolsSupported"));
  if (has_pool != 0) use_pool_in_this_thread(stream);
  return static_cast<void*>(stream);
}

Result<bool> has_ended(void* stream) {
  const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  NVFP4_MOE_TRY(check(error, "cudaStreamQuery"));
  return true;
}

void close(void* stream) {
  use_pool_in_this_thread(nullptr);
  cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DeviceStreams kCudaStreams = {cuda::open, cuda::has_ended, cuda::close};
}
