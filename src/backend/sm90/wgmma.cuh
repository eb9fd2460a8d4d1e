// wgmma m64nNk16 with A in registers: one instruction of a warpgroup, and the fences and waits around it.
//
// d (64, N) fp32 += a (64, 16) bf16 * b (16, N) bf16. Warp w of the group holds rows 16w + r and + 8 with r = lane/4, c
// = lane%4: a = (r, 2c..), (r + 8, 2c..), (r, 2c + 8..), (r + 8, 2c + 8..); d[4j..4j+3] = (r, n 8j + 2c), (r, + 1), (r
// + 8, n 8j + 2c), (r + 8, + 1). b lies in shared memory, N lines of 128 bytes (64 k), swizzled by 128 bytes.
#pragma once

#include <cstdint>

namespace nvfp4_moe::sm90 {

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the latest groups run.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of registers across a wait that it does not connect with them.
template <int kCount>
__device__ inline void pin(uint32_t (&values)[kCount]) {
#pragma unroll
  for (uint32_t& value : values) asm volatile("" : "+r"(value));
}
template <int kCount>
__device__ inline void pin(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value));
}

// The descriptor of b at an address of shared memory, a multiple of 1024; 16 k further are 2 more.
__device__ inline uint64_t lines_descriptor(uint32_t address) {
  constexpr uint64_t kEightLines = uint64_t{1024 / 16} << 32, kLeading = uint64_t{1} << 16, kSwizzle128 = 1ull << 62;
  return kSwizzle128 | kEightLines | kLeading | ((address & 0x3FFFF) >> 4);
}

// clang-format off
#define NVFP4_MOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NVFP4_MOE_D16(i) NVFP4_MOE_D4(i), NVFP4_MOE_D4(i + 4), NVFP4_MOE_D4(i + 8), NVFP4_MOE_D4(i + 12)
#define NVFP4_MOE_A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

__device__ inline void wgmma(float (&d)[4], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : NVFP4_MOE_D4(0)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[8], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7}, "
               "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
               : NVFP4_MOE_D4(0), NVFP4_MOE_D4(4)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[12], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
               "{%12, %13, %14, %15}, %16, 1, 1, 1, 0;"
               : NVFP4_MOE_D4(0), NVFP4_MOE_D4(4), NVFP4_MOE_D4(8)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[16], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
               "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : NVFP4_MOE_D16(0)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[24], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23}, "
               "{%24, %25, %26, %27}, %28, 1, 1, 1, 0;"
               : NVFP4_MOE_D16(0), NVFP4_MOE_D4(16), NVFP4_MOE_D4(20)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : NVFP4_MOE_D16(0), NVFP4_MOE_D16(16)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[48], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
               "{%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
               : NVFP4_MOE_D16(0), NVFP4_MOE_D16(16), NVFP4_MOE_D16(32)
               : NVFP4_MOE_A4, "l"(b));
}
__device__ inline void wgmma(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : NVFP4_MOE_D16(0), NVFP4_MOE_D16(16), NVFP4_MOE_D16(32), NVFP4_MOE_D16(48)
               : NVFP4_MOE_A4, "l"(b));
}
#undef NVFP4_MOE_A4
#undef NVFP4_MOE_D16
#undef NVFP4_MOE_D4
// clang-format on

}  // namespace nvfp4_moe::sm90
