// Executes one instruction of the named set without checking whether the processor has it: exit
// status 0 if it has, else an illegal instruction.
#include <cstdio>
#include <cstring>

int main(int count, char** arguments) {
  const char* set = count == 2 ? arguments[1] : "";
  if (std::strcmp(set, "portable") == 0) return 0;
#if defined(__x86_64__)
  if (std::strcmp(set, "avx2") == 0) {
    asm volatile("vpaddd %%ymm0, %%ymm0, %%ymm0" ::: "xmm0");
    return 0;
  }
  if (std::strcmp(set, "avx512") == 0) {
    asm volatile("vpaddd %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
    return 0;
  }
#elif defined(__aarch64__)
  if (std::strcmp(set, "neon") == 0) {
    asm volatile(".arch armv8.2-a+dotprod\n\tsdot v0.4s, v0.16b, v0.16b" ::: "v0");
    return 0;
  }
#endif
  std::fputs("expected portable, avx2, avx512 (x86-64) or neon (aarch64)\n", stderr);
  return 2;
}
