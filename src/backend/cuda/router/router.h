// A router on a CUDA device (backend/device_functions.h).
#pragma once

#include "backend/device_functions.h"

namespace nvfp4_moe::internal::cuda {

Status router_gemm(int device, const RouterGemm& call, void* stream);
Status select_experts(int device, const SelectExperts& call, void* stream);

inline constexpr DeviceRouter kRouter = {router_gemm, select_experts};

}  // namespace nvfp4_moe::internal::cuda
