#include "core/router_gemm.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

constexpr size_t kGemmWarps = 4, kGemmLanes = 32, kGemmVector = kRouterVector;

// Adds groups of kCount sums, kStride apart, in halves. A group's sum is stored in its first place.
template <size_t kCount, size_t kStride>
void add_halves(std::array<float, kRouterAccumulators>& sums) {
  for (size_t group = 0; group < sums.size(); group += kCount * kStride)
    for (size_t apart = kCount / 2; apart > 0; apart /= 2)
      for (size_t i = 0; i < apart; ++i)
        sums[group + i * kStride] += sums[group + (i + apart) * kStride];
}

float dot(const uint16_t* hidden, const uint16_t* weight, int64_t size) {
  std::array<float, kRouterAccumulators> sums{};
  for (int64_t first = 0; first < size; first += kRouterAccumulators) {
    const auto count = static_cast<size_t>(std::min(kRouterAccumulators, size - first));
    for (size_t i = 0; i < count; ++i) {
      const auto k = static_cast<size_t>(first) + i;
      sums[i] += bf16_to_float(hidden[k]) * bf16_to_float(weight[k]);
    }
  }
  add_halves<kGemmVector, 1>(sums);
  add_halves<kGemmLanes, kGemmVector>(sums);
  add_halves<kGemmWarps, kGemmVector * kGemmLanes>(sums);
  return sums[0];
}

}  // namespace

void router_gemm(const RouterGemm& call) {
  for (int64_t token = 0; token < call.tokens; ++token)
    for (int64_t expert = 0; expert < call.num_experts; ++expert) {
      const float logit = dot(
          static_cast<const uint16_t*>(call.hidden) + token * call.hidden_stride,
          static_cast<const uint16_t*>(call.weight) + expert * call.hidden_size, call.hidden_size);
      const int64_t at = token * call.num_experts + expert;
      if (call.logits_dtype == DType::kF32)
        static_cast<float*>(call.logits)[at] = logit;
      else
        static_cast<uint16_t*>(call.logits)[at] = bf16_from_float(logit);
    }
}

}  // namespace nvfp4_moe::internal
