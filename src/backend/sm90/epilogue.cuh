// Stores accumulators through an Epilogue, which turns them into outputs. They are stored directly
// or, if the output is bf16 and tiles are wide, transposed through shared memory, so that 64
// channels of a row (128 bytes) are written together.
//
// Each step has its own Epilogue (gemm1.cuh, gemm2.cuh), with
//
//   kJoined            two weight rows, r and r + 8, give one channel
//   kReportsNonfinite  report_if(nonfinite, row) is called for stored values
//   channels           channels per row of outputs
//   row_scale_of(token, assignment), scales(expert)     the inputs of RowFactor
//   biases(expert, weight_row), prefetch_biases(...)    of weight rows r and r + 8
//   store(row, weight_row, a, b, factor, bias)          stores the outputs of the accumulators of
//                                                       weight rows r and r + 8
//   bf16_out()         (R, channels), or null: the output is not bf16
//   value(...), plain()                                 computes one output; selects value<kPlain>
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/ptx/stmatrix.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::internal::sm90 {

__device__ inline uint32_t bf16_pair(float first, float second) {
  return uint32_t{cuda::bf16_from_float(first)} | uint32_t{cuda::bf16_from_float(second)} << 16;
}

// Whether one of eight bf16 is NaN or Inf: adding to an exponent of all ones carries.
__device__ inline bool any_nonfinite(const uint4& vec8) {
  uint32_t carries = 0;
#pragma unroll
  for (uint32_t pair : {vec8.x, vec8.y, vec8.z, vec8.w})
    carries |= (pair & 0x7F807F80u) + 0x00800080u;
  return (carries & 0x80008000u) != 0;
}

// The first weight row of a consumer thread in wgmma m, within the tile; the second is 8 rows
// further.
template <class Traits>
__device__ int32_t weight_row_of(int thread, int m) {
  return (thread / 128 * Traits::kM64 + m) * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// Stores a thread's accumulators of one wgmma, one by one. factor(i): for row i < rows.count.
template <int kN, class Epilogue, class Factor>
__device__ void store_direct(const Epilogue& epilogue, const TileRows& rows, int32_t weight_row,
                             const float (&accumulators)[kN / 2], const Factor& factor) {
  const int first = static_cast<int>(threadIdx.x % 4) * 2;
  const LaneBiases bias = epilogue.biases(rows.expert, weight_row);
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = j * 8 + first + i;
      if (row < rows.count)
        epilogue.store(rows.first + row, weight_row, accumulators[j * 4 + i],
                       accumulators[j * 4 + 2 + i], factor(row), bias);
    }
}

// Stores a consumer warpgroup's accumulators of a whole tile to bf16_out, through its staging
// buffer. kPlain: epilogue.plain(), known at compile time.
//
// A row of the buffer holds the 64 channels of one wgmma; or, if two weight rows give one channel,
// the 32 channels of each of two wgmmas. In row i the 16 bytes c are stored at c ^ i, or at c ^ i /
// 2 if two rows share the banks, so that neither kind of access has bank conflicts.
template <class Traits, bool kPlain, class Epilogue>
__device__ void store_staged(const Epilogue& epilogue, const WorkTileInfo& work,
                             const RowFactor* factors,
                             const float (&accumulators)[Traits::kM64][Traits::kTileN / 2],
                             int thread_of_cta) {
  constexpr bool kJoined = Epilogue::kJoined;
  static_assert(Traits::kM64 <= 2);
  // per warp and eight rows: eight channels each
  constexpr int kMatrices = kJoined ? Traits::kM64 : 2;
  constexpr int kPasses = kJoined ? 1 : Traits::kM64, kVec8s = kMatrices * 4;
  constexpr int kRowBytes = kVec8s * 16, kStagedRows = Traits::kStagingBytes / kRowBytes;
  const auto offset = [](int row, int vec8) {
    return row * kRowBytes + (vec8 ^ (kVec8s == 8 ? row : row / 2) % kVec8s) * 16;
  };
  const int thread = thread_of_cta % 128, warpgroup = thread_of_cta / 128;
  const int warp = thread / 32, lane = thread % 32;
  uint8_t* const staging = staging_bytes<Traits>(warpgroup);
  const int matrix = lane / 8 % kMatrices;
  const uint32_t own = ptx::shared_address(staging) +
                       offset(lane % 8, kJoined ? matrix * 4 + warp : warp * 2 + matrix);
  const int32_t first_weight_row = work.weight_row + warpgroup * Traits::kM64 * 64;
  LaneBiases biases[Traits::kM64];
#pragma unroll
  for (int m = 0; m < Traits::kM64; ++m)
    biases[m] = epilogue.biases(work.rows.expert,
                                work.weight_row + weight_row_of<Traits>(thread_of_cta, m));
#pragma unroll
  for (int first = 0; first < Traits::kTileN; first += kStagedRows)
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (first >= work.rows.count) break;
      ptx::named_barrier_sync<128>(3 + warpgroup);  // the previously staged rows have been read
#pragma unroll
      for (int row = first; row < first + kStagedRows; row += 8) {
        if (row >= work.rows.count) break;
        const auto* const two = factors + row + lane % 4 * 2;
        const RowFactor factor[2] = {two[0], two[1]};
        uint32_t pairs[kMatrices];
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) {
          float values[2];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int at = row / 2 + n;
            if constexpr (kJoined)
              values[n] = epilogue.template value<kPlain>(
                  accumulators[i][at], accumulators[i][at + 2], factor[n], biases[i]);
            else
              values[n] = epilogue.value(accumulators[pass][at + 2 * i], factor[n],
                                         i == 0 ? biases[pass].first : biases[pass].second);
          }
          pairs[i] = bf16_pair(values[0], values[1]);
        }
        ptx::stmatrix_trans(own + (row - first) * kRowBytes, pairs);
      }
      ptx::named_barrier_sync<128>(3 + warpgroup);
      const int vec8 = thread % kVec8s;
      const int64_t channel = first_weight_row / (kJoined ? 2 : 1) + pass * 64 + vec8 * 8;
#pragma unroll
      for (int i = 0; i < kStagedRows; i += 128 / kVec8s) {
        const int staged = i + thread / kVec8s;
        if (first + staged < work.rows.count && channel < epilogue.channels) {
          const auto values = *reinterpret_cast<const uint4*>(staging + offset(staged, vec8));
          const int64_t row = work.rows.first + first + staged;
          *reinterpret_cast<uint4*>(epilogue.bf16_out() + row * epilogue.channels + channel) =
              values;
          if constexpr (Epilogue::kReportsNonfinite) epilogue.report_if(any_nonfinite(values), row);
        }
      }
    }
}

}  // namespace nvfp4_moe::internal::sm90
