// gemm2 and combine of the layer in one launch (decode.cuh): the barrier of the grid, and a cta's
// output channels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/atomic.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/decode_gate_up.cuh"

namespace nvfp4_moe::internal::sm90 {

// ---- the grid

__device__ uint32_t decode_grid_counter = 0;

// The last thread reads the counter, long before it is needed: no routing waits for that thread.
inline constexpr int kDecodeGridReader = kDecodeThreads - 1;
__device__ inline uint32_t read_grid_counter() {
  return threadIdx.x == kDecodeGridReader ? cuda::ptx::load_relaxed(&decode_grid_counter) : 0;
}

// Arrives at the grid's barrier. Bit 31 of the counter flips when all ctas have: the first cta adds
// what the others leave to 2^31. The counter needs no reset, and any number of launches may use it
// one after the other. Two grids that use it never overlap before their barrier: all ctas of a grid
// are resident when it begins (a cooperative launch, of one cta per multiprocessor), so a second
// grid finds room only once ctas of the first have ended, and these have passed it. Called by one
// thread, after a barrier of its cta.
__device__ inline void arrive_at_grid(uint32_t* counter) {
  cuda::ptx::reduce_add_release(counter, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
}
// Waits until every cta of the grid has arrived, and makes their writes visible. Called by the
// thread that has arrived. before: the counter at any time between the cta's start and its arrival.
__device__ inline void wait_for_grid(uint32_t* counter, uint32_t before,
                                     cuda::ptx::WaitSite site = cuda::ptx::wait_site()) {
  cuda::ptx::WaitLimit limit(0, before >> 31, site);
  while (((cuda::ptx::load_acquire(counter) ^ before) & 0x80000000u) == 0) limit.check(false);
}

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
  float* partials;       // (blocks, rows, partials of a row, 16)
  int32_t routed, rows;  // assignments; with those of the shared expert

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
  // How an expert's accumulators become values of its rows: channels r and r + 8, tokens 2q and
  // 2q + 1.
  struct Output {
    float* to[2];  // for tokens 2q and 2q + 1; null if the token has no row
    float scale, bias[2];
  };
  __device__ Output output(const DecodeDownRow& of) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, r = lane / 4, expert = routing.expert_of[of.active];
    const DecodePart& part = part_of(args, share, of.active);
    Output to;
    to.scale = routing.scales[of.active].down;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t assignment = routing.rows[of.active][q * 2 + i];
      to.to[i] = assignment < 0 ? nullptr : partials_of(of.block, assignment) + r;
      to.bias[i] = part.down_biases.one(
          expert, static_cast<uint32_t>((share.first_block + of.block) * 16 + r + i * 8),
          args.hidden_size);
    }
    return to;
  }
  __device__ float rounded(float row) const {
    return args.rows_fp32 ? row : cuda::bf16_to_float(cuda::bf16_from_float(row));
  }
  __device__ void store(const float (&own)[4], const Output& of) const {
    constexpr float kFactor = Products::kAccumulatorFactor;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (of.to[i] == nullptr) continue;
      of.to[i][0] = rounded(fmaf(own[i] * kFactor, of.scale, of.bias[0]));
      of.to[i][8] = rounded(fmaf(own[2 + i] * kFactor, of.scale, of.bias[1]));
    }
  }
  // Counts the flags that gate/up has set, and clears them. Called by all threads of one cta.
  __device__ void count_nonfinite_rows() const {
    const int32_t word = kDecodeThreads - 1 - static_cast<int32_t>(threadIdx.x);
    if (word >= kDecodeRowWords) return;
    const uint32_t flags = atomicExch(&decode_nonfinite_rows[routing.grid_before >> 31][word], 0u);
    if (flags != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&args.status->nonfinite_rows),
                static_cast<unsigned long long>(__popc(flags)));
  }
  // Rows that do not exist become -0, which adds nothing.
  __device__ void clear_missing_rows() const {
#pragma unroll 1
    for (auto i = static_cast<int32_t>(threadIdx.x); i < blocks() * routed * 16;
         i += kDecodeThreads) {
      int32_t assignment = i / 16, block = 0;
      while (assignment >= routed) assignment -= routed, ++block;
      if (routing.active_of[assignment] < 0) partials_of(block, assignment)[i % 16] = -0.0f;
    }
  }

  __device__ int32_t blocks() const { return share.last_block - share.first_block; }
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

  // Where this lane reads the intermediate for the run's next row of subtiles.
  __device__ ColumnsAt columns_of(const DecodeRows& at) const {
    if (!at.more()) return {};
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const DecodeDownRow of(share, at.row);
    // A token without this expert reads another's row; its accumulators are not stored.
    int32_t assignment = routing.rows[of.active][lane / 4];
    const int32_t another = __reduce_max_sync(cuda::kAllLanes, assignment);
    if (assignment < 0) assignment = another;
    const auto* const row = reinterpret_cast<const uint8_t*>(decode_row(args, assignment));
    return {row + at.k_tile * 256 + lane % 4 * 16,
            part_of(args, share, of.active).row_elems / 32 - at.k_tile * 4};
  }
  // columns: of the run's first row.
  __device__ void run(DecodeRing<DecodeSubtiles>& ring, const DecodeRun& own_run, ColumnsAt columns,
                      const DecodePartials& rest) const {
    Bf16Products::Constants constants;
    constants.pin();
    DecodeRows at(own_run);
    int32_t missing = 0;
    float own[4];
#pragma unroll 1
    while (at.more()) {
      const DecodeDownRow of(share, at.row);
      const int32_t k_tiles = part_of(args, share, of.active).down_k_tiles, end = at.end(k_tiles);
      multiply_subtiles<true>(ring, GlobalColumns(columns), end - at.k_tile, constants, own);
      if (at.k_tile > 0) {
        rest.put(own_run.warp, own);
      } else {
        missing = k_tiles - end;
        if (missing > 0) break;
        store(own, output(of));
      }
      at.advance(end);
      columns = columns_of(at);
    }
    Output last;
    if (missing > 0) last = output(DecodeDownRow(share, at.row));
    __syncthreads();
    if (missing > 0) {
      rest.add_rest(own_run, missing, own);
      store(own, last);
    }
    __syncthreads();
    combine();
    if (blockIdx.x == 0) count_nonfinite_rows();
  }
};

}  // namespace nvfp4_moe::internal::sm90
