// Packed weights -> the A fragments of wgmma, in registers, for both kinds of products. A kind of
// product defines
//
//   kSteps              wgmmas per 64 k
//   kAccumulatorFactor  a factor that the epilogue must still apply
//   Weights             a lane's packed weights for 64 k and two rows, as read from a tile
//   Constants           constants that the consumers hold in registers
//   read, look_up       loads a tile's bytes into Weights, then data that depends on those bytes
//   dequantize          Weights into the four words of one step's fragment
//   multiply            one wgmma
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/fp8_tile.h"

namespace nvfp4_moe::internal::sm90 {

// bf16 times bf16 (bit layout: backend/cuda/packed_tile.h). A word gives four pairs of bf16 e2m1 *
// 2^-126, two UE5M3 scale bytes become bf16 s * 2^107, and one multiplication of each pair gives
// e2m1 * s * 2^-19, exactly.
struct Bf16Products {
  static constexpr int kSteps = 4;
  static constexpr float kAccumulatorFactor = 0x1p19f;
  struct Weights {
    uint32_t codes[kSteps];
    uint32_t scales[kSteps / 2];
  };
  struct Constants {
    uint32_t scale_base = 0x70007000u;  // kept in a register, which saves a move at every use
    __device__ void pin() { cuda::ptx::pin(scale_base); }
  };

  __device__ static void read(Weights& weights, const uint8_t* tile, int group, int half,
                              int lane) {
    const auto codes = *reinterpret_cast<const uint4*>(tile + cuda::lane_offset(group, half, lane));
    const auto scales =
        *reinterpret_cast<const uint2*>(tile + cuda::scale_offset(group, half, lane / 4));
    weights.codes[0] = codes.x, weights.codes[1] = codes.y, weights.codes[2] = codes.z,
    weights.codes[3] = codes.w;
    weights.scales[0] = scales.x, weights.scales[1] = scales.y;
  }
  template <int kStride>
  __device__ static void look_up(Weights&, const uint2*) {}
  __device__ static void dequantize(const Weights& weights, int step, const Constants& constants,
                                    uint32_t* fragment) {
    const uint32_t scales = cuda::ptx::lop3_and_or<cuda::kScalesMask>(
        cuda::scales_of_step(weights.scales[step / 2], step % 2 != 0), constants.scale_base);
    const cuda::CodePairs pairs = cuda::code_pairs(weights.codes[step]);
    fragment[0] = cuda::ptx::mul_bf16x2_low(pairs.a[0], scales);
    fragment[1] = cuda::ptx::mul_bf16x2_high(pairs.a[1], scales);
    fragment[2] = cuda::ptx::mul_bf16x2_low(pairs.a[2], scales);
    fragment[3] = cuda::ptx::mul_bf16x2_high(pairs.a[3], scales);
  }
  template <int kCount>
  __device__ static void multiply(float (&d)[kCount], const uint32_t* fragment, uint64_t rows) {
    cuda::ptx::wgmma(d, fragment, rows);
  }
};

// E4M3 times E4M3 (bit layout: fp8_tile.h). A table maps the index of a scale to the eight
// magnitudes of E2M1 times that scale as E4M3, each rounded once. PRMT selects four of them at a
// time with a word's codes.
struct Fp8Products {
  static constexpr int kSteps = 2;
  static constexpr float kAccumulatorFactor = 1.0f;
  struct Weights {
    uint32_t codes[4];    // row r, row r + 8: two steps each
    uint32_t scales;      // index for row r, and for row r + 8 in bits 8..15
    uint2 magnitudes[2];  // for row r, for row r + 8
  };
  struct Constants {
    __device__ static void pin() {}
  };

  __device__ static void read(Weights& weights, const uint8_t* tile, int group, int half,
                              int lane) {
    const auto codes = *reinterpret_cast<const uint4*>(tile + cuda::lane_offset(group, half, lane));
    weights.codes[0] = codes.x, weights.codes[1] = codes.y, weights.codes[2] = codes.z,
    weights.codes[3] = codes.w;
    weights.scales =
        *reinterpret_cast<const uint16_t*>(tile + fp8_scales_offset(group, half, lane));
  }
  template <int kStride>
  __device__ static void look_up(Weights& weights, const uint2* table) {
    // Bytes in a stage beyond a matrix's last packed tile are multiplied too and may be anything.
    constexpr uint32_t kLast = kFp8ScaleIndices - 1;
    weights.magnitudes[0] = table[min(weights.scales & 0xFF, kLast) * kStride];
    weights.magnitudes[1] = table[min(weights.scales >> 8, kLast) * kStride];
  }
  __device__ static void dequantize(const Weights& weights, int step, const Constants&,
                                    uint32_t* fragment) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = weights.codes[2 * i + step], picks = word & 0x77777777u;
      const uint2 bytes = weights.magnitudes[i];
      fragment[i] = __byte_perm(bytes.x, bytes.y, picks) | (word & 0x80808080u);
      fragment[2 + i] = __byte_perm(bytes.x, bytes.y, picks >> 16) | (word << 4 & 0x80808080u);
    }
  }
  // The table entry of one index.
  __device__ static uint2 magnitudes(uint32_t index) {
    const float scale = index == 0 ? 0.0f : __uint_as_float(fp8_scale_bits(index));
    const auto pair = [](float low, float high) { return uint32_t{cuda::ptx::e4m3x2(low, high)}; };
    return make_uint2(pair(0.0f, 0.5f * scale) | pair(scale, 1.5f * scale) << 16,
                      pair(2.0f * scale, 3.0f * scale) | pair(4.0f * scale, 6.0f * scale) << 16);
  }
  template <int kCount>
  __device__ static void multiply(float (&d)[kCount], const uint32_t* fragment, uint64_t rows) {
    cuda::ptx::wgmma_e4m3(d, fragment, rows);
  }
};

}  // namespace nvfp4_moe::internal::sm90
