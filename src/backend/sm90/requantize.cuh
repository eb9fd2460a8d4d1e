// gemm2's row producers for a small batch under fp8: they convert rows of the intermediate (R, I)
// from bf16 to E4M3 while loading them into stages, so that no kernel is needed between gemm1 and
// gemm2.
//
// A row's scale is known only after the whole row has been read. So for each work tile the row
// threads first read its rows completely to find their largest magnitudes, with many reads in
// flight, while cp.async loads the elements of its first k-blocks. Then each thread converts one
// block of 16 elements per k-block, with the same bits and the same counts as requantize
// (cuda/steps/quantize.cuh). Only the ctas of the first tile of weight rows count, each for its own
// k-blocks.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/sm90/producer.cuh"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::internal::sm90 {

// The largest magnitudes of a tile's rows, as far as one row thread reads them, in two halves each.
// Written to found[row][thread]. all_requested() is called when the last reads have been issued.
template <class Traits, class AllRequested>
__device__ void find_magnitudes(const RequantizedRows& source, const TileRows& rows, int thread,
                                uint32_t (&found)[Traits::kTileN][kProducerRowThreads],
                                const AllRequested& all_requested) {
  // reads of 16 bytes in flight: more would not leave the producer enough registers
  constexpr int kAtOnce = 4;
  const int32_t vec8s = source.k / 8,
                turns = (vec8s + kProducerRowThreads - 1) / kProducerRowThreads;
  const auto* const x = reinterpret_cast<const uint4*>(source.x) + rows.first * vec8s;
  uint32_t largest = 0;
  int32_t read_row = 0, read_turn = 0, row = 0, turn = 0;
#pragma unroll 1
  for (int32_t left = rows.count * turns; left > 0; left -= kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Beyond the row its last elements are read again, and beyond the tile its last row, so that
      // no branch separates the reads.
      const int32_t vec8 = min(read_turn * kProducerRowThreads + thread, vec8s - 1);
      values[i] = __ldcg(x + min(read_row, rows.count - 1) * vec8s + vec8);
      if (++read_turn == turns) read_turn = 0, ++read_row;
    }
    if (left <= kAtOnce) all_requested();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      largest = __vmaxu2(largest, cuda::larger_magnitudes(values[i]));
      const bool ends_row = ++turn == turns;
      if (ends_row && row < rows.count) found[row][thread] = largest;
      if (ends_row) turn = 0, largest = 0, ++row;
    }
  }
}
// The largest magnitude of a row, as fp32 bits, reduced by eight neighbouring lanes. Each has one
// eighth, `part`.
__device__ inline uint32_t largest_of_row(const uint32_t (&found)[kProducerRowThreads], int part) {
  constexpr int kVectors = kProducerRowThreads / 4 / 8;  // per lane
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint4 four = reinterpret_cast<const uint4*>(found)[part * kVectors + i];
    largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(four.x, four.y), __vmaxu2(four.z, four.w)));
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2)
    largest = __vmaxu2(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
  return cuda::larger_half(largest);
}

// Converts a block of 16 elements of a row, with magnitudes up to row_largest, to E4M3 in a stage;
// zeros for a nonfinite row. Its four words belong to four 16-byte runs (cuda/fp8_operand.h); the
// swizzle stores run v of half h at (4h + v) ^ row.
__device__ inline void store_block(uint8_t* stage, int row, int block, const uint4& first,
                                   const uint4& second, uint32_t row_largest,
                                   const cuda::RowScaleRule& rule, bool counting,
                                   cuda::BlockCounts& counts) {
  uint32_t words[4] = {};
  if (row_largest < cuda::kInfBits) {
    const float inverse = rule.inverse_of(row_largest);
    const uint32_t largest = !counting
                                 ? 0
                                 : cuda::larger_half(__vmaxu2(cuda::larger_magnitudes(first),
                                                              cuda::larger_magnitudes(second)));
    const cuda::E4m3Vec8 vec8s[2] = {cuda::E4m3Vec8::of(first, inverse, largest),
                                     cuda::E4m3Vec8::of(second, inverse, largest)};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = vec8s[i / 2].codes[i % 2];
    counts.saturated += vec8s[0].saturated;
    counts.zeroed += vec8s[0].zeroed;
  }
  const auto first_word =
      static_cast<uint32_t>(row * 128 + ((block & 4) ^ (row & 7)) * 16 + block % 4 * 4);
#pragma unroll
  for (uint32_t v = 0; v < 4; ++v)
    *reinterpret_cast<uint32_t*>(stage + (first_word ^ v * 16)) = words[v];
}

// The share of each lane of the row threads in a work tile. Eight lanes process a row's k-block,
// one block of 16 elements each. The four groups of eight lanes of a warp take one row each or, if
// a tile has fewer rows, several k-blocks. Rows 4 to 7 follow in a second pass. The warps
// alternate.
//
// A step of all warps covers at most the stages of the pipeline. So when a lane waits for a stage
// to be empty, the round before the last is known to be over, and the parity of the phase
// distinguishes the remaining cases.
template <int kStages>
class RequantizeShare {
 public:
  static constexpr int kBlocks = cuda::kTileK / 16, kGroups = 32 / kBlocks,
                       kWarps = kProducerRowThreads / 32;
  int32_t k_blocks_of_warp;  // per step
  int row, passes;           // row: in the first pass; in the second it is kGroups further

  __device__ RequantizeShare(int thread, int32_t rows)
      : passes(rows > kGroups ? 2 : 1), warp_(thread / 32) {
    const int group = thread % 32 / kBlocks, shift = rows <= 1 ? 0 : rows <= 2 ? 1 : 2;
    k_blocks_of_warp = min(kGroups >> shift, kStages / kWarps);
    row = group & ((1 << shift) - 1);
    k_block_ = group >> shift;
  }
  // The warp's first k-block of a step.
  __device__ int32_t first_k_block(int32_t step) const {
    return (step * kWarps + warp_) * k_blocks_of_warp;
  }
  // The lane's k-block; beyond all of them if it has none.
  __device__ int32_t k_block(int32_t step) const {
    return k_block_ < k_blocks_of_warp ? first_k_block(step) + k_block_ : INT32_MAX;
  }

 private:
  int warp_;
  int32_t k_block_;
};

// The role of warps 1 to 3 if they requantize.
template <class Traits, class Epilogue>
__device__ void produce_rows(const GemmArgs& args, const Epilogue& epilogue,
                             const RequantizedRows& source, const Schedule& schedule) {
  using Buffers = RequantizeBuffers<Traits>;
  constexpr uint32_t kStages = Shared<Traits>::kStages;
  using Share = RequantizeShare<kStages>;
  static_assert(Traits::kFp8 && Traits::kLateFactors && Traits::kTileN == 2 * Share::kGroups &&
                Buffers::kPasses == 2);
  Buffers& buffers = shared<Traits>().requantize;
  const int thread = static_cast<int>(threadIdx.x) - Traits::kConsumerThreads - 32;
  const int own_block = thread % Share::kBlocks;
  // The row whose factors this thread computes: the row of its group, in the first pass for the
  // first warp, in the second pass for the second warp.
  const int described_row = own_block == 0 ? thread / Share::kBlocks : kProducerRowThreads;
  WorkTileIterator work_tiles(schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0, k_blocks_before = 0;  // of earlier work tiles
  for (WorkTile work; work_tiles.next(work);
       k_blocks_before += static_cast<uint32_t>(work.k_blocks), ++index) {
    Description<Traits, Epilogue, RequantizedRows> description(args, epilogue, source, work, index,
                                                               described_row);
    const TileRows& rows = description.rows();
    const Share share(thread, rows.count);
    const int32_t first_k = work.first_k_block * cuda::kTileK + own_block * 16;
    const uint16_t* const x = source.x + (rows.first + share.row) * source.k + first_k;
    const auto has_row = [&](int pass) { return share.row + pass * Share::kGroups < rows.count; };
    const auto request = [&](int32_t step) {
      const int32_t k_block = share.k_block(step);
#pragma unroll 1
      for (int pass = 0; pass < share.passes; ++pass) {
        if (!has_row(pass) || k_block >= work.k_blocks) break;
        const bool valid = first_k + k_block * cuda::kTileK < source.k;  // otherwise zeros
        const uint16_t* const from =
            valid ? x + pass * Share::kGroups * source.k + k_block * cuda::kTileK : source.x;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::cp_async_16_or_zeros(
              ptx::shared_address(&buffers.elements[step % Buffers::kSlots][pass][half][thread]),
              from + half * 8, valid);
      }
      ptx::cp_async_commit_group();
    };
#pragma unroll 1
    for (int32_t step = 0; step < Buffers::kSlots; ++step) request(step);
    auto& magnitudes = buffers.magnitudes[index % 2];
    find_magnitudes<Traits>(source, rows, thread, magnitudes, [&] {
      if (index == 0) ptx::mbarrier_arrive(first_rows_barrier<Traits>());
    });
    ptx::named_barrier_sync<kProducerRowThreads>(1);  // all threads have written theirs
    uint32_t largest[2] = {};
#pragma unroll
    for (int pass = 0; pass < 2; ++pass)
      if (pass < share.passes)
        largest[pass] = largest_of_row(
            magnitudes[has_row(pass) ? share.row + pass * Share::kGroups : 0], own_block);
    const uint32_t described = thread < 32 ? largest[0] : largest[1];
    const bool finite = described < cuda::kInfBits;
    description.scale_row(finite ? source.rule.scale_of(described) : __uint_as_float(0x7FC00000u));
    const bool counting = work.tile.m_tile == 0;
    if (counting && work.first_k_block == 0 && described_row < rows.count) {
      uint64_t* const counter = finite ? source.counters.blocks : source.counters.nonfinite;
      atomicAdd(reinterpret_cast<unsigned long long*>(counter),
                uint64_t{finite ? source.k / 16u : 1u});
    }
    description.complete(work);
    cuda::BlockCounts counts;
    const int padded_rows = Traits::kMBlocks > 2 ? Traits::kTileN : rows.count;
#pragma unroll 1
    for (int32_t step = 0; share.first_k_block(step) < work.k_blocks; ++step) {
      const int32_t k_block = share.k_block(step);
      const uint32_t number = k_blocks_before + static_cast<uint32_t>(k_block);
      const auto stage = static_cast<int>(number % kStages);
      ptx::cp_async_wait_group<Buffers::kSlots - 1>();
      if (k_block < work.k_blocks) {
        ptx::mbarrier_wait(empty_barrier<Traits>(stage), (number / kStages & 1) ^ 1);
        uint8_t* const to = stage_bytes<Traits>(stage);
#pragma unroll 1
        for (int pass = 0; pass < share.passes; ++pass) {
          if (!has_row(pass)) break;
          const int row = share.row + pass * Share::kGroups;
          const uint32_t row_largest = pass == 0 ? largest[0] : largest[1];
          const auto& slot = buffers.elements[step % Buffers::kSlots][pass];
          store_block(to, row, own_block, slot[0][thread], slot[1][thread], row_largest,
                      source.rule, counting, counts);
        }
        // Clears padding rows, whose results nobody reads, once per stage and work tile.
        if (k_block < static_cast<int32_t>(kStages) && share.row == 0)
#pragma unroll 1
          for (int row = rows.count; row < padded_rows; ++row)
            reinterpret_cast<uint4*>(to + row * 128)[own_block] = make_uint4(0, 0, 0, 0);
      }
      request(step + Buffers::kSlots);
      // After all lanes' stores are visible, a lane arrives for the warp.
      __syncwarp();
      const int32_t end = min(share.first_k_block(step) + share.k_blocks_of_warp, work.k_blocks);
#pragma unroll 1
      for (int32_t i = share.first_k_block(step); i < end; ++i)
        if (thread % 32 < kArrivalsPerWarp)
          ptx::mbarrier_arrive(
              full_barrier<Traits>(static_cast<int>((k_blocks_before + i) % kStages)));
    }
    if (counting) {
      cuda::add(source.counters.saturated, counts.saturated);
      cuda::add(source.counters.zeroed, counts.zeroed);
    }
  }
}

}  // namespace nvfp4_moe::internal::sm90
