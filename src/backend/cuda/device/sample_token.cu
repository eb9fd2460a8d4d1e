// Samples a token of each run (backend/device_sampling.h).
//
// One cta copies it. Counters are in device memory, because several streams may run a layer at once
// and atomics on host memory need a bus that has them. The host only writes Sample::released.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/device.h"
#include "backend/cuda/device/mapped_host.h"
#include "backend/cuda/device/outside_captures.h"
#include "backend/cuda/pack/replace.h"
#include "backend/cuda/ptx/system.cuh"
#include "backend/device_sampling.h"
#include "core/fork.h"
#include "core/random.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kSampleThreads = 256;
constexpr std::chrono::milliseconds kBusyAfter{100};

using SampleCounter = unsigned long long;  // the type of CUDA's 64-bit atomics

// In device memory.
struct SampleCounters {
  SampleCounter runs, dropped, replaced;
  SampleCounter claimed[kSampleSlots];  // the last run that took the slot
};

struct SampleCall {
  const void *hidden, *ids, *out;
  const float *weights, *shared_weights;
  int64_t tokens, hidden_size;
  int top_k;
  DType hidden_dtype, ids_dtype, out_dtype;
  SampleLayout layout;
  SampleCounters* counters;
  std::byte* slots;
};

__host__ __device__ inline int64_t sampled_element_bytes(DType dtype) {
  return dtype == DType::kI64 ? 8 : dtype == DType::kF32 || dtype == DType::kI32 ? 4 : 2;
}

// Copies the array's row of `count` elements; every element has two bytes or more.
__device__ void copy_sampled_row(std::byte* to, const void* from, DType dtype, int64_t count,
                                 int64_t row) {
  const int64_t halves = count * sampled_element_bytes(dtype) / 2;
  const auto* const first = static_cast<const uint16_t*>(from) + row * halves;
  for (int64_t i = threadIdx.x; i < halves; i += kSampleThreads)
    reinterpret_cast<uint16_t*>(to)[i] = first[i];
}

// Takes the next run's slot, or returns null if the host still reads it. Two streams may ask for
// the same slot at once.
__device__ Sample* claim_slot(const SampleCall& call, SampleCounter run) {
  const SampleCounter index = run % kSampleSlots;
  auto* const slot =
      reinterpret_cast<Sample*>(call.slots + static_cast<int64_t>(index) * call.layout.slot_bytes);
  const SampleCounter released = ptx::load_acquire_system(&slot->released);
  if (atomicCAS(&call.counters->claimed[index], released, run) == released) return slot;
  atomicAdd(&call.counters->dropped, SampleCounter{1});
  return nullptr;
}

__global__ void __launch_bounds__(kSampleThreads)
    sample_token(const __grid_constant__ SampleCall call) {
  __shared__ Sample* slot;
  __shared__ SampleCounter run;
  if (threadIdx.x == 0) {
    run = atomicAdd(&call.counters->runs, SampleCounter{1}) + 1;
    slot = claim_slot(call, run);
  }
  __syncthreads();
  if (slot == nullptr) return;
  const auto token = static_cast<int64_t>(mix64(run) % static_cast<uint64_t>(call.tokens));
  auto* const bytes = reinterpret_cast<std::byte*>(slot);
  copy_sampled_row(bytes + call.layout.hidden, call.hidden, call.hidden_dtype, call.hidden_size,
                   token);
  copy_sampled_row(bytes + call.layout.out, call.out, call.out_dtype, call.hidden_size, token);
  copy_sampled_row(bytes + call.layout.ids, call.ids, call.ids_dtype, call.top_k, token);
  copy_sampled_row(bytes + call.layout.weights, call.weights, DType::kF32, call.top_k, token);
  if (threadIdx.x == 0) {
    slot->replaced = call.counters->replaced;
    slot->token = token;
    slot->hidden_dtype = call.hidden_dtype;
    slot->ids_dtype = call.ids_dtype;
    slot->out_dtype = call.out_dtype;
    slot->has_shared_weight = call.shared_weights != nullptr;
    slot->shared_weight = call.shared_weights != nullptr ? call.shared_weights[token] : 1.0f;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::fence_system();
  ptx::store_release_system(&slot->written, uint64_t{run});
}

// Two streams may note replacements in either order.
__global__ void note_replacement_kernel(SampleCounters* counters, SampleCounter number) {
  atomicMax(&counters->replaced, number);
}

class CudaRowSampler final : public RowSampler {
 public:
  static Result<std::unique_ptr<RowSampler>> open(const PackedWeights& weights) {
    const DeviceGuard guard(weights.device);
    NVFP4_MOE_TRY(guard.status());
    const OutsideCaptures outside;
    // Loads the kernels now, because a capture cannot.
    cudaFuncAttributes attributes{};
    NVFP4_MOE_TRY(check(cudaFuncGetAttributes(&attributes, sample_token), "sample_token"));
    NVFP4_MOE_TRY(
        check(cudaFuncGetAttributes(&attributes, note_replacement_kernel), "note_replacement"));

    const MoeConfig& config = weights.config;
    std::unique_ptr<CudaRowSampler> made(new CudaRowSampler);
    made->device_ = weights.device;
    made->hidden_size_ = config->hidden_size;
    made->top_k_ = static_cast<int>(config->top_k);
    made->layout_ = SampleLayout::of(config->hidden_size, config->top_k);
    const size_t host_bytes = kSampleSlots * static_cast<size_t>(made->layout_.slot_bytes);
    void *host = nullptr, *on_device = nullptr;
    NVFP4_MOE_TRY(map_host_bytes(weights.device, host_bytes, &host, &on_device));
    made->host_ = static_cast<std::byte*>(host);
    made->on_device_ = static_cast<std::byte*>(on_device);
    NVFP4_MOE_TRY(check(cudaStreamCreateWithFlags(&made->stream_, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags"));
    NVFP4_MOE_ASSIGN(made->counters_,
                     allocate(sizeof(SampleCounters), weights.device, "counters of the check"));
    int64_t staging_bytes = weights.range.count > 0 ? expert_staging_bytes(weights, 0) : 0;
    if (config->shared_intermediate_size > 0)
      staging_bytes = std::max(staging_bytes, expert_staging_bytes(weights, kSharedExpert));
    NVFP4_MOE_ASSIGN(made->staging_, allocate(static_cast<size_t>(staging_bytes), weights.device,
                                              "staging of the check"));
    NVFP4_MOE_TRY(
        check(cudaMemsetAsync(made->counters_.data(), 0, sizeof(SampleCounters), made->stream_),
              "cudaMemsetAsync"));
    NVFP4_MOE_TRY(check(cudaStreamSynchronize(made->stream_), "cudaStreamSynchronize"));
    return std::unique_ptr<RowSampler>(std::move(made));
  }

  ~CudaRowSampler() override {
    if (process_ != fork_count()) return;  // CUDA does not work in a forked child
    const DeviceGuard guard(device_);
    close();  // kernels in flight write to the pinned memory
    const OutsideCaptures outside;
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (host_ != nullptr) cudaFreeHost(host_);
  }

  Status sample(const Batch& batch, void* stream) override {
    const DeviceGuard guard(device_);
    NVFP4_MOE_TRY(guard.status());
    const SampleCall call{.hidden = batch.hidden,
                          .ids = batch.topk_ids,
                          .out = batch.out,
                          .weights = batch.topk_weights,
                          .shared_weights = batch.shared_weights,
                          .tokens = batch.tokens,
                          .hidden_size = hidden_size_,
                          .top_k = top_k_,
                          .hidden_dtype = batch.hidden_dtype,
                          .ids_dtype = batch.ids_dtype,
                          .out_dtype = batch.out_dtype,
                          .layout = layout_,
                          .counters = counters(),
                          .slots = on_device_};
    sample_token<<<1, kSampleThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
    return check_launch("sample_token");
  }

  Status note_replacement(uint64_t number, void* stream, bool at_rest) override {
    const DeviceGuard guard(device_);
    NVFP4_MOE_TRY(guard.status());
    const OutsideCaptures outside;
    const cudaStream_t in = at_rest ? stream_ : static_cast<cudaStream_t>(stream);
    note_replacement_kernel<<<1, 1, 0, in>>>(counters(), SampleCounter{number});
    NVFP4_MOE_TRY(check_launch("note_replacement"));
    return at_rest ? check(cudaStreamSynchronize(in), "note_replacement") : Status();
  }

  // After an error unpack fails too and returns it.
  void enter_thread() override { cudaSetDevice(device_); }

  bool is_busy() override {
    // Replacements are numbered from 1, so that noting 0 changes nothing.
    if (!note_replacement(0, stream_, false).ok()) return false;
    const OutsideCaptures outside;
    const auto until = std::chrono::steady_clock::now() + kBusyAfter;
    while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
      cudaGetLastError();
      if (std::chrono::steady_clock::now() > until) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return false;
  }

  Status unpack(const PackedWeights& weights, int64_t local_expert,
                decltype(Backend::unpack_expert) unpack_expert, ExpertBuffers& out) override {
    const OutsideCaptures outside;
    return unpack_expert(weights, local_expert, {stream_, &staging_}, out);
  }

  void close() override {
    staging_ = {};
    counters_ = {};
  }

  std::byte* slots() const override { return host_; }
  Result<uint64_t> dropped() const override {
    const OutsideCaptures outside;
    SampleCounter count = 0;
    NVFP4_MOE_TRY(to_host(device_, &count, &counters()->dropped, sizeof(count), stream_));
    return uint64_t{count};
  }

 private:
  CudaRowSampler() = default;
  SampleCounters* counters() const { return reinterpret_cast<SampleCounters*>(counters_.data()); }

  const uint32_t process_ = fork_count();
  int device_ = 0, top_k_ = 0;
  int64_t hidden_size_ = 0;
  SampleLayout layout_;
  std::byte *host_ = nullptr, *on_device_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Buffer counters_, staging_;
};

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DeviceSampling kCudaSampling = {cuda::CudaRowSampler::open};
}
