// gemm2 and combine of the layer in one launch (decode.cuh): the barrier of the grid, the
// intermediate in shared memory, and a cta's output channels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/atomic.cuh"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/decode_gate_up.cuh"

namespace nvfp4_moe::internal::sm90 {

// ---- the grid

// Waits until every cta of the grid has arrived, and makes their writes visible. Bit 31 of the
// counter flips when all have: the first cta adds what the others leave to 2^31. The counter needs
// no reset, and any number of launches may use it one after the other. Two grids that use it never
// overlap before their barrier: all ctas of a grid are resident when it begins (a cooperative
// launch, of one cta per multiprocessor), so a second grid finds room only once ctas of the first
// have ended, and these have passed it.
// Called by one thread, after a barrier of its cta.
__device__ inline void wait_for_grid(uint32_t* counter,
                                     cuda::ptx::WaitSite site = cuda::ptx::wait_site()) {
  const uint32_t add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  const uint32_t before = cuda::ptx::atomic_add_acq_rel(counter, add);
  cuda::ptx::WaitLimit limit(0, before >> 31, site);
  while (((cuda::ptx::load_acquire(counter) ^ before) & 0x80000000u) == 0) limit.check(false);
}

__device__ uint32_t decode_grid_counter = 0;

// ---- down and combine

// A device cannot call a constexpr function of the host, but can use its result.
template <DType kOut>
constexpr uint32_t kDecodeOverflowBits = overflow_bits(kOut);

__device__ inline void count_one(uint64_t& counter) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&counter), 1ull);
}

template <class Products = Bf16Products>
struct DecodeDown {
  const DecodeArgs& args;
  const DecodeShare& share;
  const DecodeRoutingOf<Products>& routing;
  uint8_t* x;       // the intermediate's rows: (assignments, row bytes), then the shared expert's
  float* partials;  // (blocks, rows, partials of a row, 16)
  int32_t routed, rows;  // assignments; with those of the shared expert

  __device__ uint8_t* row_of(int32_t assignment) const {
    const int32_t bytes = decode_row_bytes(args.routed.down_k_tiles);
    return assignment < routed
               ? x + assignment * bytes
               : x + routed * bytes +
                     (assignment - routed) * decode_row_bytes(args.shared.down_k_tiles);
  }
  // log2 of the partials of a row: under fp8 one for each warp that shares an expert.
  __device__ int32_t partials_shift() const {
    if constexpr (std::is_same_v<Products, Fp8Products>)
      return args.down_k_shift;
    else
      return 0;
  }
  // The partials of an assignment's row. block: from the cta's first one.
  __device__ float* partials_of(int32_t block, int32_t assignment) const {
    return partials + ((block * rows + assignment) << partials_shift()) * 16;
  }
  // Sets the elements of all rows beyond I to 0: they are multiplied too.
  __device__ void pad_rows() const {
    for (int32_t row = static_cast<int32_t>(threadIdx.x / 32); row < rows; row += kDecodeWarps) {
      const DecodePart& part = row < routed ? args.routed : args.shared;
      for (int32_t i = part.row_elems / 8 + static_cast<int32_t>(threadIdx.x % 32);
           i < part.down_k_tiles * (cuda::kTileK / 8); i += 32)
        reinterpret_cast<uint4*>(row_of(row))[i] = uint4{};
    }
  }
  // Waits for the grid, and starts the copies of all rows, part by part. Called by one warp.
  __device__ void fetch_rows() const {
    constexpr int kPer = (kDecodeAssignments + kDecodeTokens + 31) / 32;
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const auto bytes_of = [&](int32_t assignment) {
      return static_cast<uint32_t>(
          (assignment < routed ? args.routed.row_elems : args.shared.row_elems) * 2);
    };
    int32_t own_part[kPer];  // the part of each row that this lane copies, or -1
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int32_t assignment = i * 32 + lane;
      own_part[i] = assignment < rows ? routing.active_of[assignment] >> kDecodeWarpsShift : -1;
    }
#pragma unroll 1
    for (int32_t part = 0; part < parts(); ++part) {
      uint32_t bytes = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if (own_part[i] == part) bytes += bytes_of(i * 32 + lane);
      cuda::ptx::mbarrier_arrive_expect_tx(full(part), bytes);
    }
    if (lane == 0) {
      wait_for_grid(&decode_grid_counter);
      cuda::ptx::fence_proxy_async();
    }
    __syncwarp();
    const uint64_t policy = cuda::ptx::create_policy_evict_normal();
#pragma unroll 1
    for (int32_t part = 0; part < parts(); ++part)
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int32_t assignment = i * 32 + lane;
        if (own_part[i] == part)
          cuda::ptx::copy_bulk(cuda::ptx::shared_address(row_of(assignment)),
                               decode_row(args, assignment), bytes_of(assignment), full(part),
                               policy);
      }
  }
  __device__ int32_t parts() const {
    return (share.all_active + kDecodeWarps - 1) >> kDecodeWarpsShift;
  }
  __device__ uint32_t full(int32_t part) const {
    return cuda::ptx::shared_address(&routing.rows_full[part]);
  }

  // Counts nonfinite rows, each in one cta.
  __device__ void check_rows() const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32),
               warp = kDecodeWarps - 1 - static_cast<int32_t>(threadIdx.x / 32);
    const auto ctas = static_cast<int32_t>(gridDim.x);
#pragma unroll 1
    for (int32_t row = static_cast<int32_t>(blockIdx.x) + warp * ctas; row < rows;
         row += kDecodeWarps * ctas) {
      if (routing.active_of[row] < 0) continue;
      const int32_t vectors = (row < routed ? args.routed : args.shared).row_elems / 8;
      bool nonfinite = false;
      for (int32_t i = lane; i < vectors; i += 32)
        nonfinite |= any_nonfinite(reinterpret_cast<const uint4*>(row_of(row))[i]);
      if (__any_sync(cuda::kAllLanes, nonfinite) && lane == 0)
        count_one(args.status->nonfinite_rows);
    }
  }

  // Stores an expert's outputs. own: channels r and r + 8, tokens 2q and 2q + 1.
  __device__ void store(const float (&own)[4], const DecodeDownRow& of) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, r = lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t assignment = routing.rows[of.active][q * 2 + i];
      if (assignment < 0) continue;
      float* const to = partials_of(of.block, assignment);
      to[r] = own[i], to[r + 8] = own[2 + i];
    }
  }

  __device__ int32_t blocks() const { return share.last_block - share.first_block; }
  // The cta's partials -> the rows' rounded values, in the space of the first partial. An
  // assignment without a row becomes -0, which adds nothing.
  __device__ void round_rows() const {
#pragma unroll 1
    for (auto i = static_cast<int32_t>(threadIdx.x); i < blocks() * rows * 16;
         i += kDecodeThreads) {
      int32_t assignment = i / 16, block = share.first_block;
      while (assignment >= rows) assignment -= rows, ++block;
      const int32_t channel = i % 16, active = routing.active_of[assignment];
      float* const at = partials_of(0, i / 16) + channel;
      float value = -0.0f;
      if (active >= 0) {
        float sum = at[0];
#pragma unroll 1
        for (int32_t warp_k = 1; warp_k < 1 << partials_shift(); ++warp_k) sum += at[warp_k * 16];
        const float bias =
            part_of(args, share, active)
                .down_biases.one(routing.expert_of[active],
                                 static_cast<uint32_t>(block * 16 + channel), args.hidden_size);
        if constexpr (std::is_same_v<Products, Fp8Products>)
          value = fmaf(sum, routing.row_scales[assignment] * routing.scales[active].down, bias);
        else
          value = fmaf(sum * Products::kAccumulatorFactor, routing.scales[active].down, bias);
        if (!args.rows_fp32) value = cuda::bf16_to_float(cuda::bf16_from_float(value));
      }
      *at = value;
    }
  }

  // Adds the rows of each token. Called by all threads.
  __device__ void combine() const {
#pragma unroll 1
    for (auto i = static_cast<int32_t>(threadIdx.x); i < blocks() * args.tokens * 16;
         i += kDecodeThreads) {
      int32_t token = i / 16, block = 0;
      while (token >= args.tokens) token -= args.tokens, ++block;
      switch (args.out_dtype) {
        case DType::kF32: combine<DType::kF32>(block, token, i % 16); break;
        case DType::kF16: combine<DType::kF16>(block, token, i % 16); break;
        default: combine<DType::kBf16>(block, token, i % 16);
      }
    }
  }
  template <DType kOut>
  __device__ void combine(int32_t block, int32_t token, int32_t channel) const {
    const int32_t first = token * args.top_k;
    const float* const values = partials_of(block, 0) + channel;
    float acc = 0;
#pragma unroll 4
    for (int32_t k = 0; k < args.top_k; ++k) {
      const float row = values[((first + k) << partials_shift()) * 16];
      acc = args.before_down ? acc + row : fmaf(routing.weights[first + k], row, acc);
    }
    if (args.shared.groups > 0) {
      const float row = values[((routed + token) << partials_shift()) * 16];
      acc = args.shared_weights != nullptr ? fmaf(routing.weights[routed + token], row, acc)
                                           : acc + row;
    }
    if (cuda::magnitude_bits(acc) >= kDecodeOverflowBits<kOut>)
      count_one(args.status->nonfinite_outputs);
    cuda::store_element<kOut>(
        args.out, int64_t{token} * args.hidden_size + (share.first_block + block) * 16 + channel,
        acc);
  }

  __device__ void run(DecodeRing<DecodeSubtiles>& ring, const DecodeRun& own_run,
                      const DecodePartials& rest) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, token = lane / 4;
    Bf16Products::Constants constants;
    constants.pin();
    if (threadIdx.x < 32) fetch_rows();
    DecodeRows at(own_run);
    int32_t missing = 0;
    float own[4];
#pragma unroll 1
    while (at.more()) {
      const DecodeDownRow of(share, at.row);
      const int32_t k_tiles = part_of(args, share, of.active).down_k_tiles, end = at.end(k_tiles);
      cuda::ptx::mbarrier_wait(full(of.active >> kDecodeWarpsShift), 0);
      // A token without this expert reads another's row; its accumulators are not stored.
      int32_t assignment = routing.rows[of.active][token];
      const int32_t another = __reduce_max_sync(cuda::kAllLanes, assignment);
      if (assignment < 0) assignment = another;
      const uint8_t* const own_row = row_of(assignment) + q * 16;
      multiply_subtiles<true>(ring, own_row, at.k_tile, end, constants, own);
      if (at.k_tile > 0) {
        rest.put(own_run.warp, own);
      } else {
        missing = k_tiles - end;
        if (missing > 0) break;
        store(own, of);
      }
      at.advance(end);
    }
    __syncthreads();
    if (missing > 0) {
      rest.add_rest(own_run, missing, own);
      store(own, DecodeDownRow(share, at.row));
    }
    __syncthreads();
    round_rows();
    __syncthreads();
    combine();
    // also the copies end before the cta
#pragma unroll 1
    for (int32_t part = 0; part < parts(); ++part) cuda::ptx::mbarrier_wait(full(part), 0);
    check_rows();
  }
};

}  // namespace nvfp4_moe::internal::sm90
