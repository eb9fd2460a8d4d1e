// How a whole unit's sums leave a block: what an Epilogue makes of them, in bf16, transposed through shared memory, so
// that 64 channels of a line, 128 bytes, are written together.
#pragma once

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/barrier.cuh"
#include "backend/sm90/dequantize.cuh"
#include "backend/sm90/shape.cuh"

namespace nvfp4_moe::sm90 {

// Stores 8 x 8 matrices of b16 transposed: a lane gives (r, 2c), (r, 2c + 1) of each, r = lane / 4, c = lane % 4, and
// lane 8i + n the address of column n of matrix i.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&pairs)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(pairs[0]),
               "r"(pairs[1])
               : "memory");
}
__device__ inline void store_matrices(uint32_t address, const uint32_t (&pairs)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(pairs[0]) : "memory");
}

__device__ inline uint32_t bf16_pair(float first, float second) {
  return uint32_t{cuda::bf16_from_float(first)} | uint32_t{cuda::bf16_from_float(second)} << 16;
}

// Whether one of eight bf16 is NaN or Inf: adding to an exponent of all ones carries.
__device__ inline bool any_nonfinite(const uint4& eight) {
  uint32_t carries = 0;
#pragma unroll
  for (uint32_t two : {eight.x, eight.y, eight.z, eight.w}) carries |= (two & 0x7F807F80u) + 0x00800080u;
  return (carries & 0x80008000u) != 0;
}

// One math warpgroup; sums as wgmma leaves them. kPlain: epilogue.plain(), known when compiling. A slab has the
// channels of one m64 tile, or where two rows give one channel, of all: 64 or 32. Of its line i 16 bytes c lie at c ^
// i, or at c ^ i / 2 where two lines share the banks, so that neither way of access meets in a bank.
template <class S, bool kPlain, class Epilogue>
__device__ void store_whole(const Epilogue& epilogue, const PieceInfo& piece, const LineFactor* factors,
                            const float (&sums)[S::kM64][S::kLines / 2], int thread_of_block) {
  constexpr bool kJoined = Epilogue::kJoined;  // two rows give one channel
  static_assert(S::kM64 <= 2);
  constexpr int kMatrices = kJoined ? S::kM64 : 2;  // of a warp's eight lines: eight channels each
  constexpr int kTiles = kJoined ? 1 : S::kM64, kChunks = kMatrices * 4;
  constexpr int kLineBytes = kChunks * 16, kSlabLines = S::kSlabBytes / kLineBytes;
  const auto place = [](int line, int chunk) {
    return line * kLineBytes + (chunk ^ (kChunks == 8 ? line : line / 2) % kChunks) * 16;
  };
  const int thread = thread_of_block % 128, group = thread_of_block / 128;
  const int warp = thread / 32, lane = thread % 32;
  uint8_t* const slab = SharedPlaces<S>::slab(group);
  const int matrix = lane / 8 % kMatrices;
  const uint32_t own = shared_address(slab) + place(lane % 8, kJoined ? matrix * 4 + warp : warp * 2 + matrix);
  const int32_t first_row = piece.weight_row + group * S::kM64 * 64;
#pragma unroll
  for (int first = 0; first < S::kLines; first += kSlabLines)
#pragma unroll
    for (int s = 0; s < kTiles; ++s) {
      if (first >= piece.rows.count) break;
      sync_threads<128>(3 + group);  // who read the slab before
#pragma unroll
      for (int line = first; line < first + kSlabLines; line += 8) {
        if (line >= piece.rows.count) break;
        const auto* const two = factors + line + lane % 4 * 2;
        const LineFactor factor[2] = {two[0], two[1]};
        uint32_t pairs[kMatrices];
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) {
          float values[2];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int at = line / 2 + n;
            if constexpr (kJoined)
              values[n] = epilogue.template value<kPlain>(sums[i][at], sums[i][at + 2], factor[n]);
            else
              values[n] = epilogue.value(sums[s][at + 2 * i], factor[n]);
          }
          pairs[i] = bf16_pair(values[0], values[1]);
        }
        store_matrices(own + (line - first) * kLineBytes, pairs);
      }
      sync_threads<128>(3 + group);
      const int chunk = thread % kChunks;
      const int64_t channel = first_row / (kJoined ? 2 : 1) + s * 64 + chunk * 8;
#pragma unroll
      for (int i = 0; i < kSlabLines; i += 128 / kChunks) {
        const int line = i + thread / kChunks;
        if (first + line < piece.rows.count && channel < epilogue.channels) {
          const auto eight = *reinterpret_cast<const uint4*>(slab + place(line, chunk));
          const int64_t row = piece.rows.first + first + line;
          *reinterpret_cast<uint4*>(epilogue.bf16_out() + row * epilogue.channels + channel) = eight;
          if constexpr (Epilogue::kFlagsRows) epilogue.flag_if(any_nonfinite(eight), row);
        }
      }
    }
}

}  // namespace nvfp4_moe::sm90
