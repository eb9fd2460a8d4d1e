// The instruction set "avx512vnni": vpdpbusd on 512-bit registers, and W4A16 with fp32
// multiply-adds. int8_avx512.h and float_tile.h contain the two multiplications. Up to four rows of
// W4A16 use vpdpbusd too, if they have integers (integer_block_avx512.h).
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vnni")
namespace nvfp4_moe::internal::cpu {
namespace {

// The order matters: each needs the ones before it.
// clang-format off
#include "backend/cpu/vector_avx512.h"
#include "backend/cpu/operands_x86.h"
#include "backend/cpu/gelu_situ_rows.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/float_block.h"
#include "backend/cpu/float_small_batch.h"
#include "backend/cpu/float_tile.h"
// clang-format on

constexpr bool kPermuteBytes = false;
constexpr PrefetchInto kPrefetchInto = PrefetchInto::kL2;
[[maybe_unused]] inline __m512i permute_bytes(__m512i, __m512i table) {
  return table;
}  // never called

#include "backend/cpu/int8_avx512.h"
// Must come after int8_avx512.h.
#include "backend/cpu/integer_block_avx512.h"

// More rows would have other bits than without integers.
constexpr int kIntegerRows = kFloatSmallBatchRows;

void multiply_bf16(const Strip& strip, const OperandRows& all, float* acc) {
  if (all.count > kIntegerRows || !all.for_single_row || all.same_bits || all.k < kChunkK)
    return multiply_fp32(strip, all, acc);
  const auto floats = [](const std::byte* row, int64_t index, float*) {
    return reinterpret_cast<const float*>(row) + index * kBlockElems;
  };
  multiply_integers<kIntegerRows>(
      strip, IntegerRows{all.rows, strip.chunks * kFloatChunkBytes, floats}, all.count, acc);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::internal::cpu {
namespace {

bool runs_on_host() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Kernels kAvx512VnniKernels{
    .name = "avx512vnni",
    .backend_name = "cpu:avx512vnni",
    .requires_text = "AVX512F, BW, VL and VNNI",
    .runs_on_host = runs_on_host,
    .nvfp4 = {"avx512vnni_int8", kInt8ChunkBytes, 1, multiply_int8},
    .int8_block = {"avx512vnni_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"avx512_fp32", kFloatChunkBytes, 1, multiply_bf16, kIntegerChunkBytes},
    .fp8 = {"avx512_fp32_e4m3", kFloatChunkBytes, 1, multiply_fp8},
    .nvfp4_operands = nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = fp32_operands,
    .single_row_operands = integer_blocks_of_floats<kFloatChunkBytes>,
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
