#include "backend/cpu/kernels.h"

namespace nvfp4_moe::cpu {

const Kernels& best_kernels() {
  static const Kernels& best = []() -> const Kernels& {
    for (const Kernels* kernels : kAllKernels)
      if (kernels->runs_here()) return *kernels;
    return kPortableKernels;
  }();
  return best;
}

}  // namespace nvfp4_moe::cpu
