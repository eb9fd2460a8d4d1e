// Steps of one rank of several: ids (T, k) -> slots (T, k) before the layer; parts (ranks, count)
// fp32 -> out (count) after it.
//
// Each element is added by one thread in rank order, so every rank and every transport gets the
// bits of the host's sum. Memory is the limit: a thread has 8 elements and reads each part as two
// 16-byte words.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/mapped_host.h"
#include "backend/cuda/device/outside_captures.h"
#include "backend/cuda/exchange/packets.cuh"
#include "backend/cuda/exchange/slots.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/system.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/device_exchange.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kRankThreads = 256;
constexpr int kRankElements = 8;       // per thread
constexpr unsigned kCheckCtas = 1024;  // a few per multiprocessor

unsigned ctas_of(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kRankThreads)); }

__global__ void __launch_bounds__(kRankThreads) slots_kernel(SlotsOfIds call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t assignment = int64_t{blockIdx.x} * kRankThreads + threadIdx.x,
                token = assignment / call.top_k;
  if (token < call.tokens) put_slot(call, token, assignment % call.top_k);
}

template <DType kOut>
__global__ void __launch_bounds__(kRankThreads) sum_kernel(SumOfRanks call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t first = (int64_t{blockIdx.x} * kRankThreads + threadIdx.x) * kRankElements;
  if (first >= call.count) return;
  float sum[kRankElements];
  for (int64_t rank = 0; rank < call.ranks; ++rank) {
    const auto* const part =
        reinterpret_cast<const float4*>(call.parts + rank * call.count + first);
    const float4 low = part[0], high = part[1];
    const float values[kRankElements] = {low.x,  low.y,  low.z,  low.w,
                                         high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kRankElements; ++i) sum[i] = rank == 0 ? values[i] : sum[i] + values[i];
  }
#pragma unroll
  for (int i = 0; i < kRankElements; ++i) store_element<kOut>(call.out, first + i, sum[i]);
}

// Runs after the last collective, which may have ended because the host aborted it; the host sets
// the word first. The word is in host memory and slow to read, so each CTA reads it once, and there
// are few CTAs.
template <DType kType>
__global__ void __launch_bounds__(kRankThreads) check_reduced_kernel(CheckReduced call) {
  __shared__ bool failed;
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (threadIdx.x == 0)
    failed = call.link_failed != nullptr && ptx::load_volatile(call.link_failed) != 0;
  unsigned nonfinite = 0;
  const auto each = [&](auto body) {
    for (int64_t first = (int64_t{blockIdx.x} * kRankThreads + threadIdx.x) * kRankElements;
         first < call.count; first += int64_t{gridDim.x} * kRankThreads * kRankElements)
#pragma unroll
      for (int i = 0; i < kRankElements; ++i) body(first + i);
  };
  each([&](int64_t i) {
    nonfinite += magnitude_bits(load_element<kType>(call.values, i)) >= kInfBits;
  });
  __syncthreads();
  if (failed) {
    nonfinite = 0;
    each([&](int64_t i) {
      store_element<kType>(call.values, i, __uint_as_float(0x7FC00000u));
      ++nonfinite;
    });
  }
  nonfinite = __reduce_add_sync(0xFFFFFFFFu, nonfinite);
  if (threadIdx.x % 32 == 0 && nonfinite != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(call.nonfinite),
              static_cast<unsigned long long>(nonfinite));
}

Status slots_of_ids(int device, const SlotsOfIds& call, void* stream) {
  if (call.tokens == 0) return {};
  return launch_on<slots_kernel>(device, "slots_of_ids", ctas_of(call.tokens * call.top_k),
                                 kRankThreads, stream, call);
}

Status sum_of_ranks(int device, const SumOfRanks& call, void* stream) {
  if (call.count == 0) return {};
  const unsigned ctas = ctas_of(call.count / kRankElements);
  return with_dtype(call.out_dtype, [&](auto out) {
    return launch_on<sum_kernel<out.value>>(device, "sum_of_ranks", ctas, kRankThreads, stream,
                                            call);
  });
}

Status check_reduced(int device, const CheckReduced& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  auto* const queue = static_cast<cudaStream_t>(stream);
  NVFP4_MOE_TRY(
      check(cudaMemsetAsync(call.nonfinite, 0, sizeof(*call.nonfinite), queue), "check_reduced"));
  if (call.count == 0) return {};
  const unsigned ctas = std::min(ctas_of(call.count / kRankElements), kCheckCtas);
  return with_dtype(call.dtype, [&](auto dtype) {
    return launch<check_reduced_kernel<dtype.value>>("check_reduced", ctas, kRankThreads, 0, stream,
                                                     call);
  });
}

Status set_event(int device, void** event, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  auto* made = static_cast<cudaEvent_t>(*event);
  if (made == nullptr)
    NVFP4_MOE_TRY(
        check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
  *event = made;
  return check(cudaEventRecord(made, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
}

Result<bool> event_reached(int device, void* event) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  NVFP4_MOE_TRY(check(error, "cudaEventQuery"));
  return true;
}

void drop_event(int device, void* event) {
  const DeviceGuard guard(device);
  if (event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void drop_host_word(int device, uint32_t* word) { drop_mapped_host(device, word); }

Status on_device(int device, Status (*body)(void* argument), void* argument) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return body(argument);
}

constexpr DeviceRanks kRanks = {slots_of_ids,
                                sum_of_ranks,
                                check_reduced,
                                set_event,
                                event_reached,
                                drop_event,
                                make_mapped_host<uint32_t>,
                                drop_host_word,
                                on_device};

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DeviceRanks kCudaRanks = cuda::kRanks;
}
