// A small sum over ranks by marked pairs (backend/device_peers.h): what sum_small has and a combine that adds the ranks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/peers.cuh"

namespace nvfp4_moe::cuda {

// One run's, as a thread sees it. Made behind the kernels before this one, whose last sum has moved the round.
class PairSum {
 public:
  __device__ explicit PairSum(const PeerSum& call)
      : call_(call), round_(call.link.wait.control->round + 1), stopped_(leaves_out(call.link.wait)) {}

  // The i-th pair of this rank's partial sum, to all others. Stopped, they wait for it in vain.
  __device__ void push(int64_t i, float2 mine) const {
    for (int rank = 0; rank < call_.link.world && !stopped_; ++rank)
      if (rank != call_.link.rank) ptx::store_pair(pairs(rank, call_.link.rank) + i, mine.x, mine.y, mark());
  }

  // Its sum over all ranks, in their order; NaN where one did not come.
  __device__ float2 take(int64_t i, float2 mine) const {
    constexpr float kNan = __builtin_nanf("");
    float2 sum{};
    for (int rank = 0; rank < call_.link.world; ++rank) {
      float2 part = mine;
      if (rank != call_.link.rank) {
        MarkedPair pair{};
        const auto there = [&] {
          pair = ptx::load_pair(pairs(call_.link.rank, rank) + i);
          return pair.first_mark == mark() && pair.second_mark == mark();
        };
        const bool came = wait_for_rank(
            call_.link.wait, [&] { return rank; }, there);
        part = came ? make_float2(pair.first, pair.second) : make_float2(kNan, kNan);
      }
      sum = rank == 0 ? part : make_float2(sum.x + part.x, sum.y + part.y);
    }
    return sum;
  }

  // By a CTA that has pushed and taken all of its pairs, one of `ctas`. True: to thread 0 of the last one, which ends the run,
  // since no other one reads the round any more.
  __device__ bool is_last(unsigned ctas) const {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    PeerControl* const own = call_.link.wait.control;
    __threadfence();
    if (atomicAdd(&own->ctas, 1u) + 1 != ctas) return false;
    __threadfence();
    own->ctas = 0;
    return true;
  }
  __device__ void end() const { call_.link.wait.control->round = round_; }

 private:
  __device__ uint32_t mark() const { return static_cast<uint32_t>(round_) << 1 | 1; }  // never a fresh pair's
  __device__ MarkedPair* pairs(int at, int from) const {
    return reinterpret_cast<MarkedPair*>(call_.pairs.of_rank[at]) +
           (static_cast<int64_t>(round_ & 1) * call_.link.world + from) * call_.pair_stride;
  }

  const PeerSum& call_;
  const uint64_t round_;
  const bool stopped_;
};

}  // namespace nvfp4_moe::cuda
