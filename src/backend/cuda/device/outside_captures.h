// Calls that leave other streams' captures alone: memory may come and go, and a stream be asked,
// while one is captured.
#pragma once

#include <cuda_runtime_api.h>

namespace nvfp4_moe::internal::cuda {

// For as long as this lives, its thread's calls end nobody's capture.
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
