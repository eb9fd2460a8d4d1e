// Lets calls run while streams are captured: allocating, freeing and querying streams do not
// disturb a capture.
#pragma once

#include <cuda_runtime_api.h>

namespace nvfp4_moe::internal::cuda {

// While it is alive, calls of its thread invalidate no capture.
class OutsideCaptures {
 public:
  OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace nvfp4_moe::internal::cuda
