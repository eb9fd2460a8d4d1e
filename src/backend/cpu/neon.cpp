// The instruction set "neon" of aarch64: sdot on 128-bit registers for 8-bit activations, fp32
// multiply-adds for W4A16.
//
// sdot multiplies signed by signed, so weights are 2w, one byte lookup from their codes, and no
// bias is needed. A register holds four rows of a panel times four of k: a row's block is four sdot
// that start from 0, so D is exact. A small batch keeps its accumulators in registers and decodes
// four rows of a block at a time. Otherwise one block of 16 weight rows stays decoded (20 of 32
// registers) while all rows of activations pass, and the accumulators are in L1. There is no table
// without sdot: every server core since 2018 has it, and portable serves the rest.
#include "backend/cpu/kernels.h"

#if defined(NVFP4_MOE_NEON)
#include <arm_neon.h>
#include <sys/auxv.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN("arch=armv8.2-a+dotprod")
namespace nvfp4_moe::internal::cpu {
namespace {

#include "backend/cpu/vector_neon.h"

inline void int8_block_values(const uint8_t* codes, Int8Block& out) {
  const uint8x8_t pairs = vld1_u8(codes);
  const uint8x16_t even = vcombine_u8(vand_u8(pairs, vdup_n_u8(15)), vdup_n_u8(0));
  const uint8x16_t odd = vcombine_u8(vshr_n_u8(pairs, 4), vdup_n_u8(0));
  vst1q_s8(out.values, vqtbl1q_s8(doubled_table(), vzip1q_u8(even, odd)));
  out.bias = 0;
}

// The order matters: each needs the ones before it.
// clang-format off
#include "backend/cpu/gelu_situ_rows.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/float_block.h"
#include "backend/cpu/float_small_batch.h"
#include "backend/cpu/float_tile.h"
// clang-format on

inline constexpr int kQuads = kPanelRows / 4;  // quads per panel

// Four rows of a block of a panel, doubled: k 0-3, 4-7, 8-11, 12-15 of each.
struct Quad {
  int8x16_t weights[4];
};

inline Quad decode(const uint8_t* codes, int quad, int8x16_t table) {
  const uint8x16_t nibble = vdupq_n_u8(15);
  const uint8x16_t v0 = vld1q_u8(codes + 16 * quad), v1 = vld1q_u8(codes + 64 + 16 * quad);
  return {{vqtbl1q_s8(table, vandq_u8(v0, nibble)), vqtbl1q_s8(table, vshrq_n_u8(v0, 4)),
           vqtbl1q_s8(table, vandq_u8(v1, nibble)), vqtbl1q_s8(table, vshrq_n_u8(v1, 4))}};
}

// 16 block scales times 2^-8: an E4M3 byte shifted by 7 is an fp16 number that much smaller,
// including subnormals.
inline F small_scales(const uint8_t* scales) {
  const uint8x16_t bytes = vld1q_u8(scales);
  return from_fp16(vreinterpretq_f16_u16(vshll_n_u8(vget_low_u8(bytes), 7)),
                   vreinterpretq_f16_u16(vshll_high_n_u8(bytes, 7)));
}

// acc + a quad's block, with these scales, times a block of a row of activations.
inline float32x4_t add_block(const Quad& quad, float32x4_t scale, int8x16_t values, float row_scale,
                             float32x4_t acc) {
  int32x4_t sum = vdotq_laneq_s32(vdupq_n_s32(0), quad.weights[0], values, 0);
  sum = vdotq_laneq_s32(sum, quad.weights[1], values, 1);
  sum = vdotq_laneq_s32(sum, quad.weights[2], values, 2);
  sum = vdotq_laneq_s32(sum, quad.weights[3], values, 3);
  return vfmaq_f32(acc, vcvtq_f32_s32(sum), vmulq_n_f32(scale, row_scale));
}

// x 4 accumulators, in addition to 5 registers of weights
inline constexpr int64_t kInt8SmallBatchRows = 4;

// acc: of one panel of the strip.
template <int kCount>
void multiply_int8_small_batch(const Strip& strip, int64_t panel, const std::byte* const* rows,
                               float* acc, int64_t acc_stride) {
  const int8x16_t table = doubled_table();
  F sum[kCount];
  for (F& row : sum) row = splat(0.0f);
  for (int64_t c = 0; c < strip.chunks; ++c) {
    prefetch_ahead(strip, panel, c);
    const uint8_t* chunk = strip.bytes + (panel * strip.chunks + c) * kChunkBytes;
#pragma GCC unroll 1
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const F scale = small_scales(chunk + kChunkScalesOffset + b * kPanelRows);
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; ++q) {
        const Quad quad = decode(chunk + b * kBlockCodesBytes, q, table);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          const Int8Block& row = int8_blocks(rows[i])[c * kBlocksPerChunk + b];
          sum[i].v[q] = add_block(quad, scale.v[q], vld1q_s8(row.values), row.scale, sum[i].v[q]);
        }
      }
    }
  }
  for (int i = 0; i < kCount; ++i) store(acc + i * acc_stride, sum[i]);
}

void multiply_int8_large_batch(const Strip& strip, int64_t panel, const OperandRows& rows,
                               float* acc, int64_t acc_stride) {
  const int8x16_t table = doubled_table();
  for (int64_t i = 0; i < rows.count; ++i) store(acc + i * acc_stride, splat(0.0f));
  for (int64_t c = 0; c < strip.chunks; ++c) {
    prefetch_ahead(strip, panel, c);
    const uint8_t* chunk = strip.bytes + (panel * strip.chunks + c) * kChunkBytes;
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const F scale = small_scales(chunk + kChunkScalesOffset + b * kPanelRows);
      Quad quads[kQuads];
      for (int q = 0; q < kQuads; ++q) quads[q] = decode(chunk + b * kBlockCodesBytes, q, table);
      for (int64_t i = 0; i < rows.count; ++i) {
        const Int8Block& row = int8_blocks(rows.rows[i])[c * kBlocksPerChunk + b];
        const int8x16_t values = vld1q_s8(row.values);
        float* out = acc + i * acc_stride;
#pragma GCC unroll 4
        for (int q = 0; q < kQuads; ++q)
          vst1q_f32(out + 4 * q,
                    add_block(quads[q], scale.v[q], values, row.scale, vld1q_f32(out + 4 * q)));
      }
    }
  }
}

void multiply_int8(const Strip& strip, const OperandRows& rows, float* acc) {
  const int64_t acc_stride = strip.panels * kPanelRows;
  for (int64_t p = 0; p < strip.panels; ++p) {
    float* out = acc + p * kPanelRows;
    switch (rows.count) {
      case 1: multiply_int8_small_batch<1>(strip, p, rows.rows, out, acc_stride); break;
      case 2: multiply_int8_small_batch<2>(strip, p, rows.rows, out, acc_stride); break;
      case 3: multiply_int8_small_batch<3>(strip, p, rows.rows, out, acc_stride); break;
      case kInt8SmallBatchRows:
        multiply_int8_small_batch<4>(strip, p, rows.rows, out, acc_stride);
        break;
      default: multiply_int8_large_batch(strip, p, rows, out, acc_stride); break;
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::internal::cpu {
namespace {

bool runs_on_host() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

}  // namespace

const Kernels kNeonKernels{
    .name = "neon",
    .backend_name = "cpu:neon",
    .requires_text = "NEON and its dot products (Armv8.2's FEAT_DotProd, asimddp in /proc/cpuinfo)",
    .runs_on_host = runs_on_host,
    .nvfp4 = {"neon_int8", kInt8ChunkBytes, 1, multiply_int8},
    .int8_block = {"neon_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"neon_fp32", kFloatChunkBytes, 1, multiply_fp32},
    .fp8 = {"neon_fp32_e4m3", kFloatChunkBytes, 1, multiply_fp8},
    .nvfp4_operands = nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = fp32_operands,
    .fp8_operands = fp32_operands_of_fp8,
    .swiglu = swiglu_rows,
    .round = round_rows,
    .amax = row_amax,
    .quantize = quantize_row,
    .quantize_int8 = quantize_row_int8,
    .quantize_fp8 = quantize_row_fp8,
    .to_bf16 = row_to_bf16,
    .scale_hidden = scale_hidden_row,
    .combine = combine_tokens,
};

}  // namespace nvfp4_moe::internal::cpu
#endif
