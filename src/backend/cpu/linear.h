// Dense NVFP4 linear y = x W^T through the layer's inner loop: one matrix of panels, no routing.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::cpu {

size_t linear_bytes(int64_t rows, int64_t cols);
Status linear_pack(LinearWeights& weights, const Nvfp4View& source);
size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens);
Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context);

}  // namespace nvfp4_moe::cpu
