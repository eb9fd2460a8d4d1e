// One instruction of the set that is named, without asking whether the processor has it: exit status 0 where it has, an
// illegal instruction where it has not.
#include <cstdio>
#include <cstring>

int main(int count, char** arguments) {
#if defined(__x86_64__)
  const char* set = count == 2 ? arguments[1] : "";
  if (std::strcmp(set, "portable") == 0) return 0;
  if (std::strcmp(set, "avx2") == 0) {
    asm volatile("vpaddd %%ymm0, %%ymm0, %%ymm0" ::: "xmm0");
    return 0;
  }
  if (std::strcmp(set, "avx512") == 0) {
    asm volatile("vpaddd %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
    return 0;
  }
#else
  (void)count;
  (void)arguments;
#endif
  std::fputs("expected one of portable, avx2, avx512\n", stderr);
  return 2;
}
