// Barriers of ranks, and all_reduce in their peer memory (backend/device_peers.h).
//
//   barrier     one warp: reports to each rank that this one has arrived, then waits for all
//   sum_small   partial (count) -> out (count): writes pairs to every rank, then reads the pairs of
//               all ranks from its own memory, in one kernel
//   sum_large   the same for more values: each rank adds one shard and sends the total to all
//
// Each element is added by one thread in rank order, as on the host. A small sum is limited by
// latency. A large one is limited by the link: 4 bytes a value to the rank that adds it, plus out's
// bytes back.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/packets.cuh"
#include "backend/cuda/exchange/peers.cuh"
#include "backend/cuda/exchange/peers.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "core/shard.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kSumThreads = 256;
constexpr int kSumElements = 8;  // per thread, if there are many
// they wait for other ranks, so all must fit on the device, with room for other kernels
constexpr int64_t kSmallCtas = 128;
constexpr int64_t kLargeCtas = 264;
constexpr float kNan = __builtin_nanf("");

// ---- barrier

__global__ void __launch_bounds__(32) barrier_kernel(PeerLink link, bool first, uint32_t* failed) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  PeerControl* const own = link.wait.control;
  const uint64_t round = own->round + 1;
  const auto other = static_cast<int>(threadIdx.x);
  // Earlier kernels may have skipped data that this barrier would report as complete.
  bool came = !__any_sync(0xFFFFFFFFu, leaves_out(link.wait));
  if (came && other < link.world && other != link.rank) {
    // The kernels before this one have ended, so their writes precede this fence.
    ptx::fence_system();
    ptx::store_release_system(&control_of(link, other)->arrived[link.rank], round);
    came = wait_for_rank(
        link.wait, [&] { return other; },
        [&] { return ptx::load_acquire_system(&own->arrived[other]) >= round; });
  }
  came = __all_sync(0xFFFFFFFFu, came);
  __syncwarp();  // all have read the round
  if (threadIdx.x != 0) return;
  *failed = (first ? 0 : *failed) | (came ? 0 : kPeerIsLate);
  own->round = round;
}

// ---- small sum

__device__ PairWithFlags* pairs_of(const PeerSum& call, int at, int from, uint64_t round) {
  return reinterpret_cast<PairWithFlags*>(call.pairs.of_rank[at]) +
         (static_cast<int64_t>(round & 1) * call.link.world + from) * call.pair_stride;
}

template <DType kOut>
__global__ void __launch_bounds__(kSumThreads) sum_small_kernel(PeerSum call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const PeerLink& link = call.link;
  PeerControl* const own = link.wait.control;
  const uint64_t round = own->round + 1;
  // odd, so never the flag of fresh memory
  const uint32_t flag = static_cast<uint32_t>(round) << 1 | 1;
  const int64_t first = int64_t{blockIdx.x} * kSumThreads + threadIdx.x,
                step = int64_t{gridDim.x} * kSumThreads;
  const auto* const partial = reinterpret_cast<const float2*>(call.partial);
  // then the other ranks wait for these pairs until they time out or stop
  const bool stopped = leaves_out(link.wait);
  for (int64_t i = first; i < call.count / 2 && !stopped; i += step) {
    const float2 mine = partial[i];
    for (int rank = 0; rank < link.world; ++rank)
      if (rank != link.rank)
        ptx::store_pair(pairs_of(call, rank, link.rank, round) + i, mine.x, mine.y, flag);
  }
  unsigned nonfinite = 0;
  for (int64_t i = first; i < call.count / 2; i += step) {
    float2 sum{};
    for (int rank = 0; rank < link.world; ++rank) {
      float2 part{};
      if (rank == link.rank) {
        part = partial[i];
      } else {
        PairWithFlags pair{};
        const auto there = [&] {
          pair = ptx::load_pair(pairs_of(call, link.rank, rank, round) + i);
          return pair.first_flag == flag && pair.second_flag == flag;
        };
        const bool came = wait_for_rank(
            link.wait, [&] { return rank; }, there);
        part = came ? make_float2(pair.first, pair.second) : make_float2(kNan, kNan);
      }
      sum = rank == 0 ? part : make_float2(sum.x + part.x, sum.y + part.y);
    }
    store_element<kOut>(call.out, 2 * i, sum.x);
    store_element<kOut>(call.out, 2 * i + 1, sum.y);
    nonfinite += magnitude_bits(load_element<kOut>(call.out, 2 * i)) >= kInfBits;
    nonfinite += magnitude_bits(load_element<kOut>(call.out, 2 * i + 1)) >= kInfBits;
  }
  if (nonfinite != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(&own->nonfinite),
              static_cast<unsigned long long>(nonfinite));
  // The last CTA ends the run; all others have read the round by then.
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&own->ctas, 1u) + 1 != gridDim.x) return;
  __threadfence();
  *call.nonfinite = atomicExch(reinterpret_cast<unsigned long long*>(&own->nonfinite), 0ull);
  own->ctas = 0;
  if (call.count > 0)
    // with count 0 no rank has waited for another, so pairs of two rounds ago may still be unread
    own->round = round;
}

// ---- large sum

// Eight values of out in out's dtype.
template <DType kOut>
struct Stored {
  static constexpr int kVectors = kSumElements * (kOut == DType::kF32 ? 4 : 2) / 16;
  uint4 vectors[kVectors];

  __device__ explicit Stored(const float (&values)[kSumElements]) {
#pragma unroll
    for (int e = 0; e < kSumElements; ++e) store_element<kOut>(vectors, e, values[e]);
  }
  // Loads values [i, i + 8) from 16-byte aligned memory.
  __device__ Stored(const std::byte* from, int64_t i) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      vectors[v] = __ldcg(reinterpret_cast<const uint4*>(from) + i / kSumElements * kVectors + v);
  }
  __device__ void put(void* to, int64_t i) const {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) {
#pragma unroll
      for (int e = 0; e < kSumElements; ++e)
        store_element<kOut>(to, i + e, load_element<kOut>(vectors, e));
      return;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      static_cast<uint4*>(to)[i / kSumElements * kVectors + v] = vectors[v];
  }
};

__global__ void __launch_bounds__(kSumThreads) push_parts_kernel(PeerSum call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (is_stopped(call.link.wait)) return;  // the next barrier reports it
  const int world = call.link.world, self = call.link.rank;
  const int64_t first = int64_t{blockIdx.x} * kSumThreads + threadIdx.x,
                step = int64_t{gridDim.x} * kSumThreads;
  // Each rank starts with the next one, so that they do not all write to the same one.
  for (int ahead = 1; ahead < world; ++ahead) {
    const int rank = (self + ahead) % world;
    const Shard shard = Shard::of(call.count, rank, world);
    const auto* const from = reinterpret_cast<const float4*>(call.partial + shard.first);
    auto* const to = reinterpret_cast<float4*>(reinterpret_cast<float*>(call.parts.of_rank[rank]) +
                                               self * call.part_stride);
    for (int64_t i = first; i < shard.count() / 4; i += step) to[i] = from[i];
  }
}

template <DType kOut>
__global__ void __launch_bounds__(kSumThreads) sum_shard_kernel(PeerSum call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (is_stopped(call.link.wait)) return;  // the next barrier reports it
  const int world = call.link.world, self = call.link.rank;
  const Shard shard = Shard::of(call.count, self, world);
  const int64_t step = int64_t{gridDim.x} * kSumThreads * kSumElements;
  for (int64_t i = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * kSumElements;
       i < shard.count(); i += step) {
    float sum[kSumElements];
    for (int rank = 0; rank < world; ++rank) {
      const float* const parts =
          rank == self
              ? call.partial + shard.first
              : reinterpret_cast<const float*>(call.parts.of_rank[self]) + rank * call.part_stride;
      const auto* const from = reinterpret_cast<const float4*>(parts + i);
      const float4 low = __ldcg(from), high = __ldcg(from + 1);
      const float values[kSumElements] = {low.x,  low.y,  low.z,  low.w,
                                          high.x, high.y, high.z, high.w};
#pragma unroll
      for (int e = 0; e < kSumElements; ++e) sum[e] = rank == 0 ? values[e] : sum[e] + values[e];
    }
    const Stored<kOut> stored(sum);
    stored.put(call.out, shard.first + i);
    for (int ahead = 1; ahead < world; ++ahead)
      stored.put(call.totals.of_rank[(self + ahead) % world], shard.first + i);
  }
}

// Copies the other ranks' shards to out.
template <DType kOut>
__global__ void __launch_bounds__(kSumThreads) take_totals_kernel(PeerSum call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const Shard shard = Shard::of(call.count, call.link.rank, call.link.world);
  const bool failed = *call.failed != 0;
  const std::byte* const totals = call.totals.of_rank[call.link.rank];
  const int64_t step = int64_t{gridDim.x} * kSumThreads * kSumElements;
  for (int64_t i = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * kSumElements; i < call.count;
       i += step) {
    if (!failed && i >= shard.first && i < shard.end) continue;
    if (failed)
      Stored<kOut>({kNan, kNan, kNan, kNan, kNan, kNan, kNan, kNan}).put(call.out, i);
    else
      Stored<kOut>(totals, i).put(call.out, i);
  }
}

// ---- launches

unsigned ctas_of(int64_t values, int64_t of_thread, int64_t most) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(values, of_thread * kSumThreads), 1, most));
}

}  // namespace

Status sum_small(int device, const PeerSum& call, void* stream) {
  const unsigned ctas = ctas_of(call.count, 2, kSmallCtas);
  return with_dtype(call.out_dtype, [&](auto out) {
    return launch_on<sum_small_kernel<out.value>>(device, "sum_small", ctas, kSumThreads, stream,
                                                  call);
  });
}

Status sum_large(int device, const PeerSum& call, void* stream) {
  const unsigned all = ctas_of(call.count, kSumElements, kLargeCtas),
                 own = ctas_of(call.count / call.link.world, kSumElements, kLargeCtas);
  const auto barrier = [&](bool first) {
    return launch_on<barrier_kernel>(device, "barrier", 1u, 32, stream, call.link, first,
                                     call.failed);
  };
  NVFP4_MOE_TRY(launch_on<push_parts_kernel>(
      device, "push_parts", ctas_of(call.count, 4, kLargeCtas), kSumThreads, stream, call));
  NVFP4_MOE_TRY(barrier(true));
  return with_dtype(call.out_dtype, [&](auto out) -> Status {
    NVFP4_MOE_TRY(launch_on<sum_shard_kernel<out.value>>(device, "sum_shard", own, kSumThreads,
                                                         stream, call));
    NVFP4_MOE_TRY(barrier(false));
    return launch_on<take_totals_kernel<out.value>>(device, "take_totals", all, kSumThreads, stream,
                                                    call);
  });
}

}  // namespace nvfp4_moe::internal::cuda
