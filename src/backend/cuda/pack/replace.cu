// Replaces an expert in stream order (backend/device_replacement.h).
//
// A CUDA graph reads weights at fixed addresses, so the new expert must be copied over the old one.
// One kernel copies all its parts: between two kernels, another thread's replay could start. The
// staged expert is in memory of the device's pool, which is freed in stream order.
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/device.h"
#include "backend/cuda/device/outside_captures.h"
#include "backend/cuda/pack/replace.h"
#include "backend/cuda/packed_layout.h"
#include "backend/device_replacement.h"
#include "core/fork.h"

namespace nvfp4_moe::internal::cuda {
namespace {

// See pack.cu: does not wait for other threads' work.
const cudaStream_t kReplaceStream = cudaStreamPerThread;

constexpr int kPutThreads = 256;
constexpr int64_t kMostPutCtas = 1024;
constexpr int kPutLoads = 4;  // 16-byte loads in flight together

struct PutWords {
  const uint32_t* from = nullptr;
  uint32_t* to = nullptr;
  int64_t count = 0;
};
struct ExpertParts {
  const uint4* tiles;
  uint4* tiles_to;
  int64_t vecs;
  PutWords numbers[3];  // tensor scales, shifts, biases
};

__global__ void __launch_bounds__(kPutThreads)
    put_expert(const __grid_constant__ ExpertParts parts) {
  const int64_t first = int64_t{blockIdx.x} * kPutThreads + threadIdx.x,
                stride = int64_t{gridDim.x} * kPutThreads;
  for (int64_t at = first; at < parts.vecs; at += kPutLoads * stride) {
    uint4 vecs[kPutLoads];
#pragma unroll
    for (int i = 0; i < kPutLoads; ++i)
      if (at + i * stride < parts.vecs) vecs[i] = __ldcs(parts.tiles + at + i * stride);
#pragma unroll
    for (int i = 0; i < kPutLoads; ++i)
      if (at + i * stride < parts.vecs) parts.tiles_to[at + i * stride] = vecs[i];
  }
#pragma unroll
  for (const PutWords& words : parts.numbers)
    for (int64_t at = first; at < words.count; at += stride) words.to[at] = words.from[at];
  // The kernels of a run start early (launch.cuh), and its GEMM loads weights before it waits for
  // other kernels. It can read them as soon as the CTAs of this kernel have ended, so each CTA
  // makes its stores visible to the device before that.
  __threadfence();
}

// The parts of the only expert of `staged`, and their addresses in the layer.
ExpertParts parts_of(const PackedWeights& weights, int64_t local_expert,
                     const PackedWeights& staged) {
  const PackedLayout from(staged.config, staged.range), to(weights.config, weights.range);
  const int64_t index = static_cast<int64_t>(weights.index_of(local_expert));
  const int64_t only = local_expert == kSharedExpert ? kSharedExpert : 0;
  const auto words = [&](int64_t offset, int64_t offset_to, size_t bytes) {
    return PutWords{reinterpret_cast<const uint32_t*>(staged.bytes.data() + offset),
                    reinterpret_cast<uint32_t*>(weights.bytes.data() + offset_to),
                    static_cast<int64_t>(bytes / sizeof(uint32_t))};
  };
  ExpertParts parts{};
  parts.tiles = reinterpret_cast<const uint4*>(staged.bytes.data() + from.expert_offset(only));
  parts.tiles_to = reinterpret_cast<uint4*>(weights.bytes.data() + to.expert_offset(local_expert));
  parts.vecs = to.part_of(local_expert).expert_stride / static_cast<int64_t>(sizeof(uint4));
  parts.numbers[0] =
      words(0, index * static_cast<int64_t>(sizeof(TensorScales)), sizeof(TensorScales));
  if (weights.config->activation_format == ActivationFormat::kFp8)
    parts.numbers[1] =
        words(fp8_shifts_offset(staged.range),
              fp8_shifts_offset(weights.range) + index * static_cast<int64_t>(sizeof(Fp8Shifts)),
              sizeof(Fp8Shifts));
  if (const size_t bytes = packed_biases_bytes(staged.config, staged.range); bytes != 0)
    parts.numbers[2] = words(from.biases, to.biases + index * static_cast<int64_t>(bytes), bytes);
  return parts;
}

Result<StagedExpert> stage(const PackedWeights& weights, int64_t local_expert,
                           const ExpertSource& source,
                           Status (*pack)(PackedWeights&, int64_t, const ExpertSource&)) {
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  cudaFuncAttributes
      attributes{};  // makes CUDA load the kernel now, not while runs wait for its launch
  NVFP4_MOE_TRY(check(cudaFuncGetAttributes(&attributes, put_expert), "put_expert"));
  const bool shared = local_expert == kSharedExpert;
  const int64_t only = shared ? kSharedExpert : 0;
  MoeOptions options = weights.config.options();
  if (!shared) options.shared_intermediate_size = 0;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  const ExpertRange range{0, shared ? 0 : 1};
  StagedExpert staged{{config, range, weights.scales, std::vector<TensorScales>(1), Buffer()},
                      std::make_shared<void*>(kReplaceStream)};
  PackedWeights& one = staged.weights;
  one.device = weights.device;
  NVFP4_MOE_ASSIGN(
      one.bytes,
      allocate_pooled(static_cast<size_t>(PackedLayout(config, range).total_bytes), weights.device,
                      "an expert packed apart", kReplaceStream, staged.release_in));
  NVFP4_MOE_ASSIGN(one.staging,
                   allocate_pooled(static_cast<size_t>(expert_staging_bytes(one, only)),
                                   weights.device, "staging for packing", kReplaceStream,
                                   std::make_shared<void*>(kReplaceStream)));
  NVFP4_MOE_TRY(pack(one, only, source));
  one.staging = {};
  return Result<StagedExpert>(std::move(staged));
}

// An event whose deleter waits for it; it is destroyed before the layer's memory.
Result<ReplacementEvent> make_event(int device) {
  cudaEvent_t event = nullptr;
  NVFP4_MOE_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "replace: event"));
  return ReplacementEvent(event, [device, process = fork_count()](void* made) {
    if (process != fork_count()) return;
    const DeviceGuard guard(device);
    const OutsideCaptures outside;
    cudaEventSynchronize(static_cast<cudaEvent_t>(made));
    cudaEventDestroy(static_cast<cudaEvent_t>(made));
  });
}

Status put(PackedWeights& weights, int64_t local_expert, StagedExpert& staged,
           ReplacementEvent& last, void* stream) {
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (last == nullptr) {
    NVFP4_MOE_ASSIGN(last, make_event(weights.device));
  }
  const auto event = static_cast<cudaEvent_t>(last.get());
  NVFP4_MOE_TRY(check(cudaStreamWaitEvent(queue, event, 0), "replace: the replacement before"));
  const ExpertParts parts = parts_of(weights, local_expert, staged.weights);
  const int64_t ctas =
      std::clamp<int64_t>(ceil_div(parts.vecs, kPutThreads * kPutLoads), 1, kMostPutCtas);
  *staged.release_in = stream;
  put_expert<<<static_cast<unsigned>(ctas), kPutThreads, 0, queue>>>(parts);
  NVFP4_MOE_TRY(check_launch("put_expert"));
  NVFP4_MOE_TRY(check(cudaEventRecord(event, queue), "replace: event"));
  const size_t index = weights.index_of(local_expert);
  weights.tensor_scales[index] = staged.weights.tensor_scales[0];
  weights.zero_scale_codes[index] = std::move(staged.weights.zero_scale_codes[0]);
  if (!weights.fp8_weights.empty()) weights.fp8_weights[index] = staged.weights.fp8_weights[0];
  return {};
}

Status wait(const ReplacementEvent& last) {
  if (last == nullptr) return {};
  const OutsideCaptures outside;
  return check(cudaEventSynchronize(static_cast<cudaEvent_t>(last.get())), "replace: waiting");
}

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DeviceReplacement kCudaReplacement = {cuda::stage, cuda::put, cuda::wait};
}
