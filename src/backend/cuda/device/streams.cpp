#include <cuda_runtime_api.h>

#include "backend/cuda/device/check.h"
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

void close(void* stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DeviceStreams kCudaStreams = {cuda::open, cuda::has_ended, cuda::close};
}
