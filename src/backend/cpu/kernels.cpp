#include "backend/cpu/kernels.h"

namespace nvfp4_moe::cpu {

namespace {

// Intel's cores take vdpbf16ps every other cycle and a fused multiply-add of half its products twice in one: a host of
// theirs that gives no tiles runs W4A16 half as fast again in fp32, and W4A4 as fast.
bool slower_than_next([[maybe_unused]] const Kernels& kernels) {
#if defined(__x86_64__)
  return &kernels == &kAvx512Bf16Kernels && __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

}  // namespace

const Kernels& best_kernels() {
  static const Kernels& best = []() -> const Kernels& {
    for (const Kernels* kernels : kAllKernels)
      if (kernels->runs_on_host() && !slower_than_next(*kernels)) return *kernels;
    return kPortableKernels;
  }();
  return best;
}

}  // namespace nvfp4_moe::cpu
