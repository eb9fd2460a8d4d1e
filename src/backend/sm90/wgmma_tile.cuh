// A tile of a grouped GEMM in wgmma m64nNk16: each of two warpgroups owns 64 of the tile's 128 weight rows.
//
// The fragment of a warp of wgmma's A operand is that of mma.m16n8k16, and so is that of its sums, so weights are
// loaded and widened as on any GPU; the lines' stages are B operands as they lie (K-major, 128-byte swizzle). The
// widening of a step overlaps the products of the step before: its fragments have registers of their own, and one group
// of products is left in flight. A stage is filled again two steps after its products were issued.
#pragma once

#include "backend/cuda/gemm_tile.cuh"

namespace nvfp4_moe::sm90 {

// Registers and shared memory that wgmma reads were written before: orders them.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving what defines or reads the sums into the products' flight, where it would serialize
// them.
template <int kCount>
__device__ inline void pin_sums(float (&d)[kCount][4]) {
#pragma unroll
  for (auto& four : d) asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
}
// Shared memory written by cp.async is read through the asynchronous proxy next: in each writing thread, before the
// barrier.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// d += a b: m64nNk16, bf16 in, fp32 sums; d as in Sums, a as in widen, b a descriptor of N lines x 16 k.
__device__ inline void wgmma_bf16(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void wgmma_bf16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Lines of 128 bytes in groups of eight, 1024 bytes apart, in the 128-byte swizzle; address: a multiple of 1024, plus
// 32 bytes for each k16 step.
__device__ inline uint64_t lines_descriptor(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 | (address & 0x3FFFF) >> 4;
}

template <int kTileLines>
struct WgmmaTile {
  static constexpr int kRows = kTileLines;
  static constexpr int kStages = 4;

  static __device__ void multiply(const cuda::GemmArgs& args, const cuda::BlockRows& rows, int64_t row_tile,
                                  cuda::Sums<kRows>& sums) {
    __shared__ alignas(1024) uint16_t stages[kStages][kRows * cuda::kStageK];
    __shared__ int64_t lines[kRows];
    for (int i = static_cast<int>(threadIdx.x); i < kRows; i += cuda::kGemmThreads)
      lines[i] = cuda::line_of_row(args, rows.first + min(i, rows.count - 1));
    __syncthreads();

    // Whole rounds of stages: steps beyond K have weights and lines of zeros, and no branch parts the products.
    const int64_t steps = (args.k + cuda::kStageK - 1) / cuda::kStageK;
    const uint8_t* const tiles = cuda::row_tile_weights(args, rows, row_tile);
    const auto address = [&](int stage) { return static_cast<uint32_t>(__cvta_generic_to_shared(stages[stage])); };
    cuda::StepWeights weights[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) weights[stage] = cuda::load_weights(tiles, stage, steps);
#pragma unroll
    for (int stage = 0; stage < kStages - 2; ++stage)
      cuda::copy_lines<kRows>(args, rows.count, lines, stage, address(stage));
#pragma unroll
    for (auto& line_sums : sums.at)
      for (float& sum : line_sums) sum = 0;
    pin_sums(sums.at);

    uint32_t a[2][4][4];  // (step parity, k16 step, fragment)
    for (int64_t first = 0; first < steps; first += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int64_t step = first + stage;
        uint32_t(&fragments)[4][4] = a[stage % 2];
        const cuda::StepWeights now = weights[stage];
        weights[stage] = cuda::load_weights(tiles, step + kStages, steps);
        cuda::widen(now.codes.x, now.scales.x & 0x00FF00FFu, fragments[0]);
        cuda::widen(now.codes.y, now.scales.x >> 8 & 0x00FF00FFu, fragments[1]);
        cuda::widen(now.codes.z, now.scales.y & 0x00FF00FFu, fragments[2]);
        cuda::widen(now.codes.w, now.scales.y >> 8 & 0x00FF00FFu, fragments[3]);
        cuda::wait_copies<kStages - 3>();
        fence_async_proxy();
        __syncthreads();  // the stage is there for all, and the products of two steps ago are done for all
        cuda::copy_lines<kRows>(args, rows.count, lines, step + kStages - 2, address((stage + kStages - 2) % kStages));
        wgmma_fence();
#pragma unroll
        for (int k16 = 0; k16 < 4; ++k16)
          wgmma_bf16(sums.at, fragments[k16], lines_descriptor(address(stage) + static_cast<uint32_t>(k16 * 32)));
        wgmma_commit();
        wgmma_wait<1>();
      }
    }
    wgmma_wait<0>();
    pin_sums(sums.at);
    cuda::wait_copies<0>();
  }
};

}  // namespace nvfp4_moe::sm90
