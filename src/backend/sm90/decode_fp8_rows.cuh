// E4M3 activations of the layer in one launch (decode_fp8.cuh): hidden and the intermediate in
// shared memory, with a power of two as each row's scale.
//
// Rows with the same weights are columns of one product. The operand interleaves them without
// padding: run v (16 bytes along K, in the order of cuda/fp8_operand.h) of column c of C columns is
// at (v C + c) 16. So eight columns of a run are a core matrix of wgmma without swizzle. If C is
// less than 8, its last columns are bytes of the next runs, and nobody uses their products.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/fp8_operand.h"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/steps/quantize_args.cuh"
#include "backend/sm90/decode_gate_up.cuh"

namespace nvfp4_moe::internal::sm90 {

// The columns of one product in shared memory.
struct Fp8Columns {
  uint8_t* at;
  int32_t count;

  // Stores the vec8-th eight elements of a column.
  __device__ void put(int32_t column, int32_t vec8, const uint32_t (&codes)[2]) const {
    auto* const to = reinterpret_cast<uint32_t*>(
        at + ((vec8 / 8 * 4 + vec8 % 2 * 2) * count + column) * 16 + vec8 % 8 / 2 * 4);
    to[0] = codes[0], to[count * 4] = codes[1];
  }
};
// Zeros after the last column's end: weights that are 0 are multiplied by them.
__device__ inline void clear_tail(uint8_t* at, int32_t thread, int32_t threads) {
#pragma unroll 1
  for (int32_t i = thread; i < kFp8TailBytes / 16; i += threads)
    reinterpret_cast<uint4*>(at)[i] = uint4{};
}

// Ranks the rows of the intermediate. Called by one warp.
__device__ inline void rank_rows(Fp8DecodeRouting& routing, int32_t all_active) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  int32_t before = 0;
#pragma unroll 1
  for (int32_t first = 0; first < all_active; first += 32) {
    const int32_t active = first + lane;
    int32_t count = 0;
    if (active < all_active)
#pragma unroll
      for (int token = 0; token < kDecodeTokens; ++token) count += routing.rows[active][token] >= 0;
    int32_t end = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(cuda::kAllLanes, end, distance);
      if (lane >= distance) end += other;
    }
    int32_t rank = before + end - count;
    before += __shfl_sync(cuda::kAllLanes, end, 31);
    if (active >= all_active) continue;
    routing.first_rank[active] = static_cast<int16_t>(rank);
#pragma unroll
    for (int token = 0; token < kDecodeTokens; ++token)
      if (routing.rows[active][token] >= 0)
        routing.assignment_of[rank++] = routing.rows[active][token];
  }
  if (lane == 0) routing.first_rank[all_active] = static_cast<int16_t>(before);
}

// ---- hidden

// Eight elements of a row of hidden.
struct HiddenVec8 {
  float x[8];
  int32_t token, vec8;
  bool valid;  // it is a vec8 of the operand, which may be padding

  __device__ uint32_t magnitude() const {
    uint32_t largest = 0;
#pragma unroll
    for (const float value : x) largest = max(largest, cuda::magnitude_bits(value));
    return largest;
  }
};
template <DType kType>
__device__ HiddenVec8 hidden_vec8(const DecodeArgs& args, int32_t index) {
  const int32_t vec8s = args.k_tiles * (cuda::kTileK / 8);
  HiddenVec8 to{};
  to.token = args.by_vec8s(index);
  to.valid = to.token < args.tokens;
  to.token = min(to.token, args.tokens - 1);
  to.vec8 = index - to.token * vec8s;
  if (to.valid && to.vec8 * 8 < args.hidden_size)
    cuda::load_elements<kType>(args.hidden, int64_t{to.token} * args.hidden_size + to.vec8 * 8,
                               to.x);
  return to;
}

// Quantizes hidden into the columns (T), in two steps with a barrier of the cta between them:
// read() finds each row's largest magnitude, and quantize() may run while weights are on their way,
// since a thread keeps its first kKept vec8s. Both are called by the threads from `first_thread`
// on. A row has a multiple of 16 vec8s, so half a warp has vec8s of one row.
template <int kKept>
class Fp8Hidden {
 public:
  __device__ Fp8Hidden(const DecodeArgs& args, const cuda::RowScaleRule& rule,
                       Fp8DecodeRouting& routing, const Fp8Columns& columns, int32_t first_thread)
      : args_(args),
        rule_(rule),
        routing_(routing),
        columns_(columns),
        thread_(static_cast<int32_t>(threadIdx.x) - first_thread),
        threads_(kDecodeThreads - first_thread) {}

  template <DType kType>
  __device__ void read() {
    if (thread_ < kDecodeTokens)
      routing_.magnitudes[thread_] = routing_.saturated[thread_] = routing_.zeroed[thread_] = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept_[i] = hidden_vec8<kType>(args_, thread_ + i * threads_);
    cuda::ptx::named_barrier_sync(15, threads_);
#pragma unroll
    for (int i = 0; i < kKept; ++i) find(kept_[i]);
#pragma unroll 1
    for (int32_t at = kKept * threads_; has_rest(at); at += threads_)
      find(hidden_vec8<kType>(args_, thread_ + at));
  }
  template <DType kType>
  __device__ void quantize() const {
    clear_tail(columns_.at + args_.tokens * args_.k_tiles * cuda::kTileK, thread_, threads_);
#pragma unroll
    for (int i = 0; i < kKept; ++i) quantize_one(kept_[i]);
#pragma unroll 1
    for (int32_t at = kKept * threads_; has_rest(at); at += threads_)
      quantize_one(hidden_vec8<kType>(args_, thread_ + at));
    if (thread_ < args_.tokens) {
      const uint32_t largest = routing_.magnitudes[thread_];
      routing_.hidden_scales[thread_] =
          largest < cuda::kInfBits ? rule_.scale_of(largest) : __uint_as_float(0x7FC00000u);
    }
    cuda::ptx::fence_proxy_async_shared();
  }

 private:
  // Whether a thread of this warp has the vec8 `at` after its first one.
  __device__ bool has_rest(int32_t at) const {
    return thread_ / 32 * 32 + at < args_.tokens * args_.k_tiles * (cuda::kTileK / 8);
  }
  __device__ void find(const HiddenVec8& vec8) const {
    uint32_t largest = vec8.magnitude();
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2)
      largest = max(largest, __shfl_xor_sync(cuda::kAllLanes, largest, distance));
    if (threadIdx.x % 16 == 0 && vec8.valid) atomicMax(&routing_.magnitudes[vec8.token], largest);
  }
  __device__ void quantize_one(const HiddenVec8& vec8) const {
    const bool counting = blockIdx.x == 0;
    const uint32_t largest = routing_.magnitudes[vec8.token];
    uint32_t of_block = 0;
    if (counting) {
      of_block = vec8.magnitude();
      of_block = max(of_block, __shfl_xor_sync(cuda::kAllLanes, of_block, 1));
    }
    if (!vec8.valid) return;
    cuda::E4m3Vec8 to{};
    if (largest < cuda::kInfBits)
      to = cuda::E4m3Vec8::of(vec8.x, rule_.inverse_of(largest), of_block);
    columns_.put(vec8.token, vec8.vec8, to.codes);
    if (counting && threadIdx.x % 2 == 0) {
      if (to.saturated) atomicAdd(&routing_.saturated[vec8.token], 1u);
      if (to.zeroed) atomicAdd(&routing_.zeroed[vec8.token], 1u);
    }
  }

  const DecodeArgs& args_;
  const cuda::RowScaleRule& rule_;
  Fp8DecodeRouting& routing_;
  const Fp8Columns& columns_;
  int32_t thread_, threads_;
  HiddenVec8 kept_[kKept];
};
// Adds the counts of hidden. Called by one thread of cta 0.
__device__ inline void count_hidden(const DecodeArgs& args, const Fp8DecodeRouting& routing,
                                    RunStatus& status) {
#pragma unroll 1
  for (int32_t token = 0; token < args.tokens; ++token) {
    if ((routing.tokens_with_rows >> token & 1) == 0) continue;
    if (routing.magnitudes[token] >= cuda::kInfBits) {
      ++status.nonfinite_tokens;
      continue;
    }
    status.hidden_blocks += static_cast<uint64_t>(args.hidden_size / 16);
    status.hidden_saturated += routing.saturated[token];
    status.hidden_zeroed += routing.zeroed[token];
  }
}

// ---- the intermediate

// The columns of an active expert's rows of the intermediate.
__device__ inline Fp8Columns columns_of(const DecodeArgs& args, const Fp8DecodeRouting& routing,
                                        uint8_t* x, int32_t active) {
  const int32_t first = routing.first_rank[active];
  return {x + first * (args.routed.down_k_tiles * cuda::kTileK),
          routing.first_rank[active + 1] - first};
}

// Quantizes all rows of the intermediate from global memory, in every cta; one of them counts. A
// row is read by one warp, or by several if there are fewer rows than warps.
class Fp8Intermediate {
 public:
  __device__ Fp8Intermediate(const DecodeArgs& args, const DecodeShare& share,
                             const cuda::RowScaleRule& rule, Fp8DecodeRouting& routing, uint8_t* x)
      : args_(args), share_(share), rule_(rule), routing_(routing), x_(x) {}

  __device__ void quantize() {
    const int32_t rows = routing_.first_rank[share_.all_active];
    const auto warp = static_cast<int32_t>(threadIdx.x / 32);
    const int32_t shift = rows > 8 ? 0 : rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 ? 3 : 4;
    part_ = warp & ((1 << shift) - 1), parts_shift_ = shift;
    clear_tail(x_ + (routing_.row_count * args_.routed.down_k_tiles +
                     (args_.shared.groups > 0 ? args_.tokens * args_.shared.down_k_tiles : 0)) *
                        cuda::kTileK,
               static_cast<int32_t>(threadIdx.x), kDecodeThreads);
    int32_t rank = warp >> shift;
    uint4 kept[kKept], next[kKept];
    load(rank, rows, kept);
    if (shift > 0) {  // one row a warp
      const uint32_t largest = magnitude(rank, rows, kept);
      if (threadIdx.x % 32 == 0) routing_.magnitude_of_warp[warp] = largest;
      __syncthreads();
      uint32_t of_row = 0;
#pragma unroll 1
      for (int32_t other = 0; other < 1 << shift; ++other)
        of_row = max(of_row, routing_.magnitude_of_warp[(rank << shift) + other]);
      if (rank < rows) put(rank, of_row, kept);
      return;
    }
#pragma unroll 1
    for (; rank < rows; rank += kDecodeWarps) {
      load(rank + kDecodeWarps, rows, next);
      put(rank, magnitude(rank, rows, kept), kept);
#pragma unroll
      for (int i = 0; i < kKept; ++i) kept[i] = next[i];
    }
  }

 private:
  static constexpr int kKept = 4;

  __device__ const DecodePart& part_of_rank(int32_t rank) const {
    return rank < routing_.row_count ? args_.routed : args_.shared;
  }
  __device__ const uint4* vec8s_of(int32_t rank) const {
    return reinterpret_cast<const uint4*>(decode_row(args_, routing_.assignment_of[rank]));
  }
  // The i-th vec8 of a row that this lane has.
  __device__ int32_t vec8_of(int32_t i) const {
    return (((i << parts_shift_) + part_) << 5) + static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ void load(int32_t rank, int32_t rows, uint4 (&to)[kKept]) const {
    const int32_t vec8s = rank < rows ? part_of_rank(rank).channels / 8 : 0;
    const uint4* const from = vec8s_of(min(rank, max(rows - 1, 0)));
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      to[i] = vec8_of(i) < vec8s ? __ldcg(from + vec8_of(i)) : uint4{};
  }
  // The largest magnitude of this warp's part of the row, as fp32 bits.
  __device__ uint32_t magnitude(int32_t rank, int32_t rows, const uint4 (&kept)[kKept]) const {
    uint32_t largest = 0;
#pragma unroll
    for (const uint4& vec8 : kept) largest = __vmaxu2(largest, cuda::larger_magnitudes(vec8));
    const int32_t vec8s = rank < rows ? part_of_rank(rank).channels / 8 : 0;
#pragma unroll 1
    for (int32_t i = kKept; vec8_of(i) < vec8s; ++i)
      largest = __vmaxu2(largest, cuda::larger_magnitudes(__ldcg(vec8s_of(rank) + vec8_of(i))));
    return __reduce_max_sync(cuda::kAllLanes, cuda::larger_half(largest));
  }
  __device__ void put(int32_t rank, uint32_t largest, const uint4 (&kept)[kKept]) const {
    const DecodePart& part = part_of_rank(rank);
    const int32_t assignment = routing_.assignment_of[rank],
                  active = routing_.active_of[assignment],
                  column = rank - routing_.first_rank[active], vec8s = part.channels / 8,
                  padded = part.down_k_tiles * (cuda::kTileK / 8);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const Fp8Columns columns = columns_of(args_, routing_, x_, active);
    const bool finite = largest < cuda::kInfBits,
               counting =
                   rank % static_cast<int32_t>(gridDim.x) == static_cast<int32_t>(blockIdx.x);
    const float inverse = finite ? rule_.inverse_of(largest) : 0.0f;
    unsigned saturated = 0, zeroed = 0;
    const auto put_one = [&](const uint4& x, int32_t vec8) {
      cuda::E4m3Vec8 to{};
      if (counting)
        to = cuda::E4m3Vec8::of(x, inverse);
      else
        to = cuda::E4m3Vec8::of(x, inverse, 0);
      if (!finite) to = cuda::E4m3Vec8{};
      saturated += to.saturated && vec8 % 2 == 0;
      zeroed += to.zeroed && vec8 % 2 == 0;
      if (vec8 < padded) columns.put(column, vec8, to.codes);
    };
#pragma unroll
    for (int i = 0; i < kKept; ++i) put_one(kept[i], vec8_of(i));
#pragma unroll 1
    for (int32_t i = kKept; vec8_of(i) - lane < padded; ++i)
      put_one(vec8_of(i) < vec8s ? __ldcg(vec8s_of(rank) + vec8_of(i)) : uint4{}, vec8_of(i));
    if (lane == 0 && part_ == 0)
      routing_.row_scales[assignment] =
          finite ? rule_.scale_of(largest) : __uint_as_float(0x7FC00000u);
    if (!counting) return;
    cuda::add(&args_.status->intermediate_saturated, saturated);
    cuda::add(&args_.status->intermediate_zeroed, zeroed);
    if (lane == 0 && part_ == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(finite ? &args_.status->intermediate_blocks
                                                             : &args_.status->nonfinite_rows),
                finite ? static_cast<unsigned long long>(part.channels / 16) : 1ull);
  }

  const DecodeArgs& args_;
  const DecodeShare& share_;
  const cuda::RowScaleRule& rule_;
  Fp8DecodeRouting& routing_;
  uint8_t* x_;
  int32_t part_ = 0, parts_shift_ = 0;
};

}  // namespace nvfp4_moe::internal::sm90
