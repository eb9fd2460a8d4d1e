// Dense NVFP4 linear y = x W^T with the layer's kernels: one matrix of panels, no routing.
#pragma once

#include "backend/backend.h"
#include "backend/cpu/kernels.h"

namespace nvfp4_moe::internal::cpu {

size_t linear_bytes(int64_t rows, int64_t cols);
Status linear_pack(LinearWeights& weights, const Nvfp4View& source);
size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens,
                              const Kernels& kernels);
Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context, const Kernels& kernels);

}  // namespace nvfp4_moe::internal::cpu
