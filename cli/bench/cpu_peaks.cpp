#include "cli/bench/cpu_peaks.h"

#include <algorithm>

#include "backend/cpu/target.h"
#include "cli/bench/all_threads.h"
#include "core/amx_tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nvfp4_moe::internal::cli {
namespace {

// Each loop keeps enough sums in registers to hide the latency of its instructions. An empty asm
// that takes a register makes the compiler assume that the register changes. So computations from
// it stay in the loop, and sums that end in it are not optimized away.
#if defined(__x86_64__)

// ---- AVX-512: 16 weight rows x 16 of K in 8 bits, scaled, as the integer kernels take a line's
// block

NVFP4_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vnni")
constexpr int kVnniBlocks = 12;
void vnni_scaled(int64_t rounds) {
  const __m512i weights = _mm512_set1_epi8(3), line = _mm512_set1_epi8(-5);
  const __m512 row_scale = _mm512_set1_ps(0.75f);
  __m512i bias = _mm512_set1_epi32(7);
  __m512 block_scale = _mm512_set1_ps(1.25f), acc[kVnniBlocks];
  for (__m512& part : acc) part = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m512& part : acc) {
      asm volatile("" : "+v"(bias), "+v"(block_scale));
      __m512i sum = bias;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, weights, line);
      part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(block_scale, row_scale), part);
    }
  }
  for (__m512& part : acc) asm volatile("" : "+v"(part));
}
NVFP4_MOE_TARGET_END

// ---- AVX-512: vdpbf16ps, fp32 multiply-adds

NVFP4_MOE_TARGET_BEGIN("avx512f,avx512bf16")
constexpr int kDotChains = 16;
void bf16_dot(int64_t rounds) {
  const auto x = (__m512bh)_mm512_set1_epi32(0x3FC03F80);
  __m512 acc[kDotChains];
  for (__m512& part : acc) part = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (__m512& part : acc) part = _mm512_dpbf16_ps(part, x, x);
  }
  for (__m512& part : acc) asm volatile("" : "+v"(part));
}
NVFP4_MOE_TARGET_END

constexpr int kFmaChains = 12;
NVFP4_MOE_TARGET_BEGIN("avx512f")
void fma_512(int64_t rounds) {
  const __m512 x = _mm512_set1_ps(1.25f), y = _mm512_set1_ps(0.75f);
  __m512 acc[kFmaChains];
  for (__m512& part : acc) part = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m512& part : acc) part = _mm512_fmadd_ps(x, y, part);
  }
  for (__m512& part : acc) asm volatile("" : "+v"(part));
}
NVFP4_MOE_TARGET_END

// ---- AVX2: fp32 multiply-adds; 8 weight rows x 16 of K in 8 bits, scaled

NVFP4_MOE_TARGET_BEGIN("avx2,fma")
void fma_256(int64_t rounds) {
  const __m256 x = _mm256_set1_ps(1.25f), y = _mm256_set1_ps(0.75f);
  __m256 acc[kFmaChains];
  for (__m256& part : acc) part = _mm256_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m256& part : acc) part = _mm256_fmadd_ps(x, y, part);
  }
  for (__m256& part : acc) asm volatile("" : "+x"(part));
}

inline __m256i fresh_products(__m256i& weights, __m256i line) {
  asm volatile("" : "+x"(weights));
  return _mm256_maddubs_epi16(weights, line);
}
// Only the last of about twelve instructions depends on the previous round, so six sums are
// enough, and they fit into 16 registers.
constexpr int kMaddubsHalves = 6;
void maddubs_scaled(int64_t rounds) {
  __m256i weights = _mm256_set1_epi8(3);
  const __m256i line = _mm256_set1_epi8(-5), one = _mm256_set1_epi16(1),
                bias = _mm256_set1_epi32(7);
  const __m256 row_scale = _mm256_set1_ps(0.75f);
  __m256 block_scale = _mm256_set1_ps(1.25f), acc[kMaddubsHalves];
  for (__m256& part : acc) part = _mm256_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 6
    for (__m256& part : acc) {
      __m256i sum = fresh_products(weights, line);
#pragma GCC unroll 3
      for (int j = 0; j < 3; ++j) sum = _mm256_add_epi16(sum, fresh_products(weights, line));
      sum = _mm256_add_epi32(_mm256_madd_epi16(sum, one), bias);
      asm volatile("" : "+x"(block_scale));
      part = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(block_scale, row_scale), part);
    }
  }
  for (__m256& part : acc) asm volatile("" : "+x"(part));
}
NVFP4_MOE_TARGET_END

// ---- AMX: two by two tiles of 16 lines x 16 weight rows

// The operand of ldtilecfg, for tiles 0-3 of sums, 4-5 of lines and 6-7 of weights, `pairs` of K
// deep.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit constexpr TileShapes(uint8_t pairs) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * pairs : 64);
      rows[tile] = tile >= 6 ? pairs : 16;
    }
  }
};
struct alignas(64) TileOfOnes {
  uint16_t bf16[16][32] = {};
  constexpr TileOfOnes() {
    for (auto& row : bf16)
      for (uint16_t& value : row) value = 0x3F80;
  }
};
// Constants, because the intrinsics of GCC do not tell the compiler that they read memory.
constexpr TileShapes kFullTiles(16), kHalfTiles(8);
constexpr TileOfOnes kOnes;
constexpr double kTileFlop = 2.0 * 16 * 16 * 32;

NVFP4_MOE_TARGET_BEGIN("amx-tile,amx-bf16")
void multiply_tiles(const TileShapes& shapes, int64_t rounds) {
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, kOnes.bf16, 64);
  _tile_loadd(5, kOnes.bf16, 64);
  _tile_loadd(6, kOnes.bf16, 64);
  _tile_loadd(7, kOnes.bf16, 64);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
NVFP4_MOE_TARGET_END
void full_tiles(int64_t rounds) { multiply_tiles(kFullTiles, rounds); }
void half_tiles(int64_t rounds) { multiply_tiles(kHalfTiles, rounds); }

// ---- requirements of the loops

bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
bool has_avx512_vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
constexpr ComputePeak kVnniScaled{"avx512_vnni_scaled",
                                  "4 vpdpbusd, vcvtdq2ps, vmulps, vfmadd (512 bits)",
                                  kVnniBlocks * 2.0 * 16 * 16, has_avx512_vnni, vnni_scaled};
constexpr ComputePeak kBf16Dot{"avx512_bf16_dot", "vdpbf16ps (512 bits)", kDotChains * 2.0 * 32,
                               has_avx512_bf16, bf16_dot};
constexpr ComputePeak kFma512{"avx512_fma", "vfmadd (512 bits)", kFmaChains * 2.0 * 16, has_avx512,
                              fma_512};
constexpr ComputePeak kMaddubsScaled{
    "avx2_maddubs_scaled",
    "4 vpmaddubsw, 3 vpaddw, vpmaddwd, vpaddd, vcvtdq2ps, vmulps, vfmadd (256 bits)",
    kMaddubsHalves * 2.0 * 8 * 16, has_avx2, maddubs_scaled};
constexpr ComputePeak kFma256{"avx2_fma", "vfmadd (256 bits)", kFmaChains * 2.0 * 8, has_avx2,
                              fma_256};
constexpr ComputePeak kFullTile{"amx_bf16_tiles", "tdpbf16ps, 16 x 16 x 32", 4 * kTileFlop,
                                bf16_tiles_run_on_host, full_tiles};
constexpr ComputePeak kHalfTile{"amx_bf16_half_tiles", "tdpbf16ps, 16 x 16 x 16", 2 * kTileFlop,
                                bf16_tiles_run_on_host, half_tiles};

constexpr ComputePeak kPeaks[] = {kVnniScaled, kBf16Dot,  kFma512,  kMaddubsScaled,
                                  kFma256,     kFullTile, kHalfTile};

// The instructions of the CPU backend's kernels.
constexpr struct {
  std::string_view kernel, peak;
} kPeakOfKernel[] = {
    {"avx512vbmi_vnni_int8", "avx512_vnni_scaled"},
    {"avx512vnni_int8", "avx512_vnni_scaled"},
    {"avx512bf16_bf16", "avx512_bf16_dot"},
    {"avx512_fp32", "avx512_fma"},
    {"avx2_int8", "avx2_maddubs_scaled"},
    {"avx2_fp32", "avx2_fma"},
    {"amx_bf16_tiles", "amx_bf16_tiles"},
    {"amx_bf16_half_tiles", "amx_bf16_half_tiles"},
    {"avx512bf16_e4m3", "avx512_bf16_dot"},
    {"avx512_fp32_e4m3", "avx512_fma"},
    {"avx2_fp32_e4m3", "avx2_fma"},
    {"amx_e4m3_as_bf16_tiles", "amx_bf16_tiles"},
};
#endif

}  // namespace

std::span<const ComputePeak> compute_peaks() {
#if defined(__x86_64__)
  return kPeaks;
#else
  return {};
#endif
}

const ComputePeak* peak_of_kernel([[maybe_unused]] std::string_view kernel) {
#if defined(__x86_64__)
  for (const auto& bound : kPeakOfKernel) {
    if (bound.kernel != kernel) continue;
    for (const ComputePeak& peak : kPeaks)
      if (bound.peak == peak.name && peak.runs_here()) return &peak;
  }
#endif
  return nullptr;
}

double measure(const ComputePeak& peak, Executor& executor) {
  constexpr double kPassSeconds = 0.004;
  constexpr int kPasses = 4;
  double best = 0;
  int64_t rounds = 1 << 10;
  for (int pass = 0; pass < kPasses;) {
    const double seconds = time_on_all_threads(executor, [&](int64_t) { peak.loop(rounds); });
    if (seconds < kPassSeconds) {  // too short to measure
      rounds *= 2;
      continue;
    }
    best = std::max(best, static_cast<double>(executor.threads()) * static_cast<double>(rounds) *
                              peak.flop / seconds);
    ++pass;
  }
  return best;
}

}  // namespace nvfp4_moe::internal::cli
