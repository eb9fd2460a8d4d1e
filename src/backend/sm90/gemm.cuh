// The grouped GEMM of Hopper: packed weight rows as wgmma's A operand, widened to bf16 in registers, times lines of
// activations from shared memory. What is done with the sums is the caller's Epilogue.
//
// One persistent block a multiprocessor, five warpgroups around a ring of stages of 128 k each:
//
//   loading   weights, lines of activations, what a piece is (load.cuh)
//   math      four, each a share of the stage's weight rows: registers -> dequantize -> wgmma. Each waits for its own
//             products, and the others fill the time
//
// full[s]: the stage is there; empty[s]: all warps are done with it. piece_full[i], piece_free[i]: the same of what a
// piece is and of its line factors, of which two pieces' are kept. factors_full[i]: under kFactorsLater the factors are
// there too. begun: the first lines are on their way.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/sm90/barrier.cuh"
#include "backend/sm90/dequantize.cuh"
#include "backend/sm90/load.cuh"
#include "backend/sm90/shape.cuh"
#include "backend/sm90/store.cuh"
#include "backend/sm90/wgmma.cuh"
#include "backend/sm90/work.h"

namespace nvfp4_moe::sm90 {

// A math warpgroup's place in the ring and the weights that it has read ahead.
template <class S>
struct MathState {
  RingPlace<S::kStages> place;
  uint32_t scale_base = kScaleBase;
  uint4 codes[S::kM64];                              // of 64 k, a k16 step a word
  uint2 scales[S::kM64];                             // of the same
  uint32_t fragments[S::kGroupSteps * S::kM64 * 4];  // of one commit group

  __device__ void read(int stage, int half) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* const tiles = SharedPlaces<S>::stage(stage) + S::kLineBytes;
#pragma unroll
    for (int m = 0; m < S::kM64; ++m) {
      const int m64 = warp / 4 * S::kM64 + m, group = m64 % 2 * 4 + warp % 4;
      const uint8_t* const tile = tiles + m64 / 2 * cuda::kTileBytes;
      codes[m] = *reinterpret_cast<const uint4*>(tile + cuda::lane_offset(group, half, lane));
      scales[m] = *reinterpret_cast<const uint2*>(tile + cuda::scale_offset(group, half, lane / 4));
    }
  }
  // A piece's first codes and fragments. No piece reads for the next one: fragments that live from one product to
  // another of another width leave ptxas too few registers.
  __device__ void begin() {
    read_stage(place);
    widen<0>();
  }
  // Once the stage is there.
  __device__ void read_stage(RingPlace<S::kStages> from) {
    wait(SharedPlaces<S>::full(from.stage), from.parity);
    if constexpr (!S::kIs.tensor_lines) fence_shared_writes();
    read(from.stage, 0);
  }
  // The other half of this chunk after half 0, the next chunk's first after half 1. A piece's last chunk reads itself
  // again; nothing uses that.
  __device__ void read_on(int half, const RingPlace<S::kStages>& next, bool more) {
    if (half == 0)
      read(place.stage, 1);
    else
      read_stage(more ? next : RingPlace<S::kStages>(place));
  }
  // The group of k16 steps of the 64 k that were read last.
  template <int kGroup>
  __device__ void widen() {
#pragma unroll
    for (int i = 0; i < S::kGroupSteps; ++i)
#pragma unroll
      for (int m = 0; m < S::kM64; ++m) {
        constexpr int kFirst = kGroup * S::kGroupSteps;
        const uint32_t words[4] = {codes[m].x, codes[m].y, codes[m].z, codes[m].w};
        const int step = kFirst + i;
        const uint32_t scale_word = step / 2 == 0 ? scales[m].x : scales[m].y;
        uint32_t* const fragment = fragments + (i * S::kM64 + m) * 4;
        if (step % 2 == 0)
          dequantize<false>(words[step], scale_word, scale_base, fragment);
        else
          dequantize<true>(words[step], scale_word, scale_base, fragment);
      }
  }
};

// One warp's arrival at the ring's empty barrier of a stage.
template <class S>
__device__ void release(int stage, bool yes) {
  arrive_as_warp(SharedPlaces<S>::empty(stage), yes);
}

// Sums of all lines of a tile as wgmma leaves them: those of a narrower product are the first.
template <class S>
using Sums = float[S::kM64][S::kLines / 2];

// sums += the piece's weight rows of this warpgroup times kN of its lines.
template <class S, int kN>
__device__ void multiply(int32_t chunks, MathState<S>& state, Sums<S>& sums) {
  constexpr int kGroups = 4 / S::kGroupSteps;  // of 64 k
  static_assert(kGroups <= 2);
  constexpr bool kReadFirst = S::kLines <= 16;
  state.begin();
  int previous = 0;
#pragma unroll 1
  for (int32_t chunk = 0; chunk < chunks; ++chunk) {
    uint64_t lines = lines_descriptor(shared_address(SharedPlaces<S>::stage(state.place.stage)));
    asm volatile("" : "+l"(lines));  // else places in it are or'ed by halves, three instructions for one
    const RingPlace<S::kStages> next = state.place.next();
    const bool more = chunk + 1 < chunks;
#pragma unroll
    for (int g = 0; g < 2 * kGroups; ++g) {
      const int half = g / kGroups, of_half = g % kGroups;
      // All of this half is widened with the last group: read on. Short products leave no time for that after them.
      if (kReadFirst && of_half == kGroups - 1) state.read_on(half, next, more);
      pin(state.fragments);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < S::kGroupSteps; ++i)
#pragma unroll
        for (int m = 0; m < S::kM64; ++m)
          wgmma(reinterpret_cast<float(&)[kN / 2]>(sums[m]), state.fragments + (i * S::kM64 + m) * 4,
                lines + half * (S::kHalfLineBytes / 16) + 2 * (of_half * S::kGroupSteps + i));
      wgmma_commit();
      if (!kReadFirst && of_half == kGroups - 1) state.read_on(half, next, more);
      wgmma_wait<0>();  // the fragments are free
      if (g == 0) release<S>(previous, chunk > 0);
      if (of_half == kGroups - 1)
        state.template widen<0>();
      else
        state.template widen<1>();
    }
    previous = state.place.stage;
    state.place = next;
  }
  wgmma_wait<0>();
#pragma unroll
  for (auto& m64 : sums) pin(reinterpret_cast<float(&)[kN / 2]>(m64));
  release<S>(previous, true);
}

// With the narrowest product that holds the piece's lines.
template <class S, int kN>
__device__ void multiply_narrowest(const PieceInfo& piece, MathState<S>& state, Sums<S>& sums) {
  constexpr int kNarrower = kN - S::kIs.width_step;
  if constexpr (kNarrower >= S::kIs.least_lines)
    if (piece.rows.count <= kNarrower) return multiply_narrowest<S, kNarrower>(piece, state, sums);
  multiply<S, kN>(piece.chunks, state, sums);
}

// A thread's first weight row within its group of rows, of m64 tile m; the other is 8 further.
template <class S>
__device__ int32_t row_of(int thread, int m) {
  return (thread / 128 * S::kM64 + m) * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// threadIdx.x read anew: what is computed from it is not kept in registers through the products before.
__device__ inline int thread_anew() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread);
}

// The sums of one m64 tile to the epilogue. factor(line) for lines below rows.count.
template <int kN, class Epilogue, class Factor>
__device__ void finish(const Epilogue& epilogue, const TileRows& rows, int32_t weight_row, const float (&sums)[kN / 2],
                       const Factor& factor) {
  const int first_line = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int line = j * 8 + first_line + i;
      if (line < rows.count)
        epilogue.store(rows.first + line, weight_row, sums[j * 4 + i], sums[j * 4 + 2 + i], factor(line));
    }
}

// The place of four sums of a math thread in a partial: coalesced over the threads.
template <class S>
__device__ float4* partial_place(const GemmArgs& args, int32_t partial, int m, int quad, int thread) {
  return reinterpret_cast<float4*>(args.partials) + partial * S::kPartialQuads +
         (m * (S::kLines / 8) + quad) * S::kMathThreads + thread;
}

template <class S, class Epilogue>
__device__ void multiply_piece(const GemmArgs& args, const Epilogue& epilogue, uint32_t index, MathState<S>& state) {
  Sums<S> sums;
#pragma unroll
  for (auto& m64 : sums) {
#pragma unroll
    for (float& sum : m64) sum = 0;
    pin(m64);
  }
  multiply_narrowest<S, S::kLines>(SharedPlaces<S>::piece(index), state, sums);
  if constexpr (S::kFactorsLater) wait(SharedPlaces<S>::factors_full(index), index / 2 & 1);
  const PieceInfo piece = SharedPlaces<S>::piece(index);  // not before, so that no register holds it meanwhile
  const LineFactor* const factors = SharedPlaces<S>::factors(index);
  const int thread = thread_anew();
  if constexpr (S::kIs.tensor_lines) {
    if (piece.partial < 0 && epilogue.bf16_out() != nullptr) {
      if (epilogue.plain()) return store_whole<S, true>(epilogue, piece, factors, sums, thread);
      return store_whole<S, false>(epilogue, piece, factors, sums, thread);
    }
  }
#pragma unroll
  for (int m = 0; m < S::kM64; ++m) {
    if (piece.partial < 0) {
      finish<S::kLines>(epilogue, piece.rows, piece.weight_row + row_of<S>(thread, m), sums[m],
                        [&](int line) { return factors[line]; });
    } else {
#pragma unroll
      for (int quad = 0; quad < S::kLines / 8; ++quad)
        if (quad * 8 + thread % 4 * 2 < piece.rows.count)
          *partial_place<S>(args, piece.partial, m, quad, thread) =
              make_float4(sums[m][quad * 4], sums[m][quad * 4 + 1], sums[m][quad * 4 + 2], sums[m][quad * 4 + 3]);
    }
  }
}

// The sums of a unit that was cut: its pieces' in the order of K, then the epilogue. All math threads. index: of this
// block's piece of it. A row's four lanes share its lines, of which there may be one, and its m64 tiles, in one short
// loop: a block that comes here is the first of its multiprocessor, which waits for every instruction.
template <class S, class Epilogue>
__device__ void finish_unit(const GemmArgs& args, const Epilogue& epilogue, const UnitPieces& pieces, uint32_t index) {
  constexpr int kAtOnce = 8;  // pieces whose sums are read at once
  const PieceInfo& own = SharedPlaces<S>::piece(index);
  const LineFactor* const factors = SharedPlaces<S>::factors(index);
  const int lane = static_cast<int>(threadIdx.x % 4), row_thread = static_cast<int>(threadIdx.x) - lane;
  const TileRows rows = own.rows;
  const int pairs = (rows.count + 1) / 2;  // of lines
#pragma unroll 1
  for (int item = lane; item < pairs * S::kM64; item += 4) {
    const int m = item % S::kM64, pair = item / S::kM64;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int32_t first = 0; first < pieces.count; first += kAtOnce) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < pieces.count)
          parts[i] = __ldcg(partial_place<S>(args, pieces.partial(first + i), m, pair / 4, row_thread + pair % 4));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < pieces.count)
          total.x += parts[i].x, total.y += parts[i].y, total.z += parts[i].z, total.w += parts[i].w;
    }
    const int32_t weight_row = own.weight_row + row_of<S>(row_thread, m);
#pragma unroll 1
    for (int line = pair * 2; line < min(pair * 2 + 2, rows.count); ++line) {
      const bool first = line % 2 == 0;
      epilogue.store(rows.first + line, weight_row, first ? total.x : total.y, first ? total.z : total.w,
                     factors[line]);
    }
  }
}

// The same of a wide variant, whose blocks have long had the instructions: a thread's own sums of 32 lines at a time,
// so that many reads are on their way.
template <class S, class Epilogue>
__device__ void finish_wide_unit(const GemmArgs& args, const Epilogue& epilogue, const UnitPieces& pieces,
                                 uint32_t index) {
  constexpr int kQuads = 4;
  const PieceInfo own = SharedPlaces<S>::piece(index);
  const LineFactor* const factors = SharedPlaces<S>::factors(index);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int first_quad = 0; first_quad * 8 < own.rows.count; first_quad += kQuads) {
    float sums[kQuads][S::kM64][4] = {};
#pragma unroll 1
    for (int32_t piece = 0; piece < pieces.count; ++piece) {
      float4 parts[kQuads][S::kM64];
#pragma unroll
      for (int q = 0; q < kQuads; ++q)
#pragma unroll
        for (int m = 0; m < S::kM64; ++m)
          if ((first_quad + q) * 8 + thread % 4 * 2 < own.rows.count)
            parts[q][m] = __ldcg(partial_place<S>(args, pieces.partial(piece), m, first_quad + q, thread));
#pragma unroll
      for (int q = 0; q < kQuads; ++q)
#pragma unroll
        for (int m = 0; m < S::kM64; ++m) {
          sums[q][m][0] += parts[q][m].x, sums[q][m][1] += parts[q][m].y;
          sums[q][m][2] += parts[q][m].z, sums[q][m][3] += parts[q][m].w;
        }
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      TileRows eight = own.rows;
      eight.first += (first_quad + q) * 8;
      eight.count -= (first_quad + q) * 8;
#pragma unroll
      for (int m = 0; m < S::kM64; ++m)
        finish<8>(epilogue, eight, own.weight_row + row_of<S>(thread, m), sums[q][m],
                  [&](int line) { return factors[(first_quad + q) * 8 + line]; });
    }
  }
}

// One arrival at a counter of global memory; what the block wrote before is seen by whoever arrives later. Returns the
// arrivals before.
__device__ inline int32_t arrive_globally(int32_t* counter) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// After a block's last piece: it arrives at the units that it has a piece of, one or two, and finishes those at which
// it is the last. All math threads. index: of the last piece; that of the piece before is still there too.
template <class S, class Epilogue>
__device__ void finish_units(const GemmArgs& args, const Epilogue& epilogue, const Work& work, uint32_t index) {
  const int32_t begin = work.split_begin(static_cast<int32_t>(blockIdx.x)),
                end = work.split_begin(static_cast<int32_t>(blockIdx.x) + 1);
  if (begin == end) return;
  const int32_t last_unit = work.shape.by_chunks(end - 1), units = last_unit - work.shape.by_chunks(begin) + 1;
  sync_threads<S::kMathThreads>(2);  // all sums are stored
  if (static_cast<int32_t>(threadIdx.x) < units) {
    const auto i = static_cast<int32_t>(threadIdx.x);
    int32_t* const counter = args.arrivals + last_unit - i;
    UnitPieces pieces = work.pieces_of(last_unit - i);
    if (pieces.count == 1 || arrive_globally(counter) != pieces.count - 1)
      pieces.count = 0;
    else
      *counter = 0;
    SharedPlaces<S>::to_finish()[i] = pieces;
  }
  sync_threads<S::kMathThreads>(2);
#pragma unroll 1
  for (int32_t i = units - 1; i >= 0; --i) {
    const UnitPieces pieces = SharedPlaces<S>::to_finish()[i];
    if (pieces.count == 0) continue;
    if constexpr (S::kIs.tensor_lines)
      finish_wide_unit<S>(args, epilogue, pieces, index - static_cast<uint32_t>(i));
    else
      finish_unit<S>(args, epilogue, pieces, index - static_cast<uint32_t>(i));
  }
}

// Brings a kernel's parameters into the multiprocessor while it waits anyway.
template <class Parameters>
__device__ void touch(const Parameters& parameters) {
#pragma unroll
  for (size_t at = 0; at < sizeof(Parameters); at += 64)
    asm volatile("" ::"r"(*reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint8_t*>(&parameters) + at)));
}

// What route leaves of few choices, by one warp for its block; and the block's work.
template <class S>
__device__ void route_here(const GemmArgs& args, const cuda::ChoiceIds& choices) {
  const cuda::FewChoices own(choices, S::kLines);
  FewRows& few = SharedPlaces<S>::few();
  own.list(few.tiles, S::kLines, true);
  if (own.row() >= 0) few.assignment_of_row[own.row()] = cuda::FewChoices::lane();
  if (cuda::FewChoices::lane() == 0) SharedPlaces<S>::work() = Work(args.work, own.all_tiles);
}

template <class S, class Epilogue, class Lines>
__device__ void gemm(const GemmArgs& args, const Epilogue& epilogue, const Lines& lines) {
  static_assert(!Epilogue::kFlagsRows || (Epilogue::kJoined && S::kIs.tensor_lines));
  if (args.routed) cuda::let_next_start();
  touch(args);
  touch(epilogue);
  if (threadIdx.x == 0) {
    if (shared_address(shared_bytes) % 1024 != 0) __trap();  // the swizzle needs it
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(SharedPlaces<S>::full(s), S::kIs.tensor_lines ? 1 : 1 + kLineThreads);
      barrier_init(SharedPlaces<S>::empty(s), S::kMathThreads / 32 * kArrivalsOfWarp);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(SharedPlaces<S>::piece_full(i), kLineThreads);
      barrier_init(SharedPlaces<S>::factors_full(i), kLineThreads);
      barrier_init(SharedPlaces<S>::piece_free(i), S::kMathThreads / 32 * kArrivalsOfWarp);
    }
    barrier_init(SharedPlaces<S>::begun(), kLineThreads);
    barrier_init_done();
  }
  if constexpr (Lines::kRoutesHere) {
    if (threadIdx.x / 32 == 1) route_here<S>(args, lines.choices);
  } else {
    if (!args.routed) {  // what comes after this kernel may rely on route as soon as it starts
      cuda::wait_for_previous();
      cuda::let_next_start();
    }
    if (threadIdx.x == 0) SharedPlaces<S>::work() = Work(args.work, tiles_of<S>(args));
  }
  __syncthreads();
  const Work& work = SharedPlaces<S>::work();

  if (threadIdx.x >= S::kMathThreads) {
    leave_registers<S::kLoadRegisters>();
    if (threadIdx.x >= S::kMathThreads + 32)
      load_lines<S>(args, epilogue, lines, work);
    else if (threadIdx.x == S::kMathThreads)
      load_copies<S>(args, lines, work);
    return;
  }
  take_registers<S::kMathRegisters>();
  cuda::wait_for_previous();                                 // before any sums are stored, and in every block
  if constexpr (Lines::kRoutesHere) cuda::let_next_start();  // not before, as above
  MathState<S> state;
  asm volatile("" : "+r"(state.scale_base));  // held in a register
  int32_t left = work.chunks_of(static_cast<int32_t>(blockIdx.x));
  if (left == 0) return;
  uint32_t index = 0;
#pragma unroll 1
  for (; left > 0; ++index) {
    wait(SharedPlaces<S>::piece_full(index), index / 2 & 1);
    left -= SharedPlaces<S>::piece(index).chunks;
    multiply_piece<S>(args, epilogue, index, state);
    arrive_as_warp(SharedPlaces<S>::piece_free(index), true);
  }
  finish_units<S>(args, epilogue, work, index - 1);
}

}  // namespace nvfp4_moe::sm90
