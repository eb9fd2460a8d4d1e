// scale_hidden: hidden (T, H), topk_weights (T) -> weighted_hidden (T, H), in hidden's dtype.
//
// The weight is rounded to hidden's dtype, and the product is rounded once to it, so quantize can
// take the result like any hidden. One CTA per token; only tokens that have a row are read and
// written.
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/sizes.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

struct ScaleHiddenArgs {
  const void* hidden;                // (T, k)
  const float* weights;              // (T)
  const int32_t* row_of_assignment;  // (T), -1: no row
  void* weighted;                    // (T, k), 16-byte aligned
  int64_t k;
  uint64_t* nonfinite_tokens;  // += tokens whose product is not finite although hidden is; or null
  uint64_t* discarded_count;   // set to 0, if nonfinite_tokens is not null
};

template <DType kType>
__global__ void __launch_bounds__(kRowThreads) scale_hidden_rows(ScaleHiddenArgs args) {
  constexpr int kCount = 8, kBytes = kCount * (kType == DType::kF32 ? 4 : 2),
                kVectors = kBytes / 16;
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: gemm1 relies on route as soon as it starts
  const int64_t token = blockIdx.x;
  if (token == 0 && threadIdx.x == 0 && args.nonfinite_tokens != nullptr) *args.discarded_count = 0;
  if (args.row_of_assignment[token] < 0) return;
  __align__(4) uint8_t own_weight[4];
  store_element<kType>(own_weight, 0, args.weights[token]);
  const float weight = load_element<kType>(own_weight, 0);
  uint32_t magnitude = 0, product_magnitude = 0;
  for (int64_t i = threadIdx.x * kCount; i < args.k; i += blockDim.x * kCount) {
    const int64_t first = token * args.k + i;
    float x[kCount];
    load_elements<kType>(args.hidden, first, x);
    __align__(16) uint8_t bytes[kBytes];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      store_element<kType>(bytes, j, x[j] * weight);
      magnitude = max(magnitude, magnitude_bits(x[j]));
      product_magnitude = max(product_magnitude, magnitude_bits(load_element<kType>(bytes, j)));
    }
    auto* const to = static_cast<uint4*>(args.weighted) + first / kCount * kVectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) to[v] = reinterpret_cast<const uint4*>(bytes)[v];
  }
  if (args.nonfinite_tokens == nullptr) return;
  const bool nonfinite = __syncthreads_or(magnitude >= kInfBits) != 0;
  const bool product_nonfinite = __syncthreads_or(product_magnitude >= kInfBits) != 0;
  if (threadIdx.x == 0 && product_nonfinite && !nonfinite)
    atomicAdd(reinterpret_cast<unsigned long long*>(args.nonfinite_tokens), 1ull);
}

}  // namespace

Status scale_hidden(const StepContext& step) {
  const Batch& batch = step.batch;
  ScaleHiddenArgs args{};
  args.hidden = batch.hidden;
  args.weights = batch.topk_weights;
  args.row_of_assignment = step.buffers.row_of_assignment;
  args.weighted = step.buffers.weighted_hidden;
  args.k = step.weights.config->hidden_size;
  if (step.buffers.shared.experts > 0) {
    args.nonfinite_tokens = &step.buffers.status->nonfinite_tokens;
    args.discarded_count = Scratch(step).discarded_count;
  }
  const auto ctas = static_cast<unsigned>(batch.tokens);
  const int threads = row_threads(args.k);
  switch (batch.hidden_dtype) {
    case DType::kF32:
      return launch<scale_hidden_rows<DType::kF32>>("scale_hidden", ctas, threads, 0, step.stream,
                                                    args);
    case DType::kF16:
      return launch<scale_hidden_rows<DType::kF16>>("scale_hidden", ctas, threads, 0, step.stream,
                                                    args);
    default:
      return launch<scale_hidden_rows<DType::kBf16>>("scale_hidden", ctas, threads, 0, step.stream,
                                                     args);
  }
}

}  // namespace nvfp4_moe::internal::cuda
