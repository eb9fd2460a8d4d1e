// A router's GEMM: hidden (T, H) times the router's weights (E, H) gives the logits of every expert
// (T, E), for the few tokens of a decode step (docs/explanation/numerics.md, section 12).
//
// Order of the fp32 sum: product k is exact in fp32 unless it is out of range, and is added to
// accumulator k mod 1024, in the order of k. The accumulators are then added in halves: first 8
// neighbours (accumulator i gets i + 4, then i + 2, then i + 1), then the 32 consecutive sums of
// each quarter, then the 4 quarters. So a logit depends only on its own row and expert, and has the
// same bits on every host and GPU. For NaN, only being NaN is the same.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace nvfp4_moe::internal {

inline constexpr int64_t kRouterAccumulators = 1024;
inline constexpr int64_t kRouterVector = 8;  // elements of a row, 16 bytes, that are read as one

// One call. The arrays are all on the host or all on the device.
struct RouterGemm {
  int64_t tokens = 0;       // T
  int64_t num_experts = 0;  // E
  int64_t hidden_size = 0;  // H, a multiple of kRouterVector
  // (T, H) bf16 in rows hidden_stride elements apart, each aligned to 16 bytes
  const void* hidden = nullptr;
  int64_t hidden_stride = 0;          // a multiple of kRouterVector
  const void* weight = nullptr;       // (E, H) bf16, aligned to 16 bytes
  void* logits = nullptr;             // (T, E)
  DType logits_dtype = DType::kBf16;  // BF16: rounded once, to nearest even; or F32
};

// Computes the logits on the host. Precondition: sizes and arrays are as described above
// (moe/router.h checks).
void router_gemm(const RouterGemm& call);

}  // namespace nvfp4_moe::internal
