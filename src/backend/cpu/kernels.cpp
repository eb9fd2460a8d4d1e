#include "backend/cpu/kernels.h"

#include <bit>

namespace nvfp4_moe::internal::cpu {

namespace {

// Intel cores execute vdpbf16ps every other cycle, and a fused multiply-add with half its products
// twice per cycle. So an Intel host without tiles runs W4A16 1.5 times as fast in fp32, and W4A4
// equally fast.
bool slower_than_next([[maybe_unused]] const Kernels& kernels) {
#if defined(__x86_64__)
  return &kernels == &kAvx512Bf16Kernels && __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

}  // namespace

void swiglu_tail(const MoeOptions& options, uint32_t lanes, const float* gate, const float* up,
                 float* out) {
  const GatedActivation activation = GatedActivation::of(options);
  for (; lanes != 0; lanes &= lanes - 1) {
    const int i = std::countr_zero(lanes);
    out[i] = activation.tail(gate[i], up[i]);
  }
}

const Kernels& best_kernels() {
  static const Kernels& best = []() -> const Kernels& {
    for (const Kernels* kernels : kAllKernels)
      if (kernels->runs_on_host() && !slower_than_next(*kernels)) return *kernels;
    return kPortableKernels;
  }();
  return best;
}

}  // namespace nvfp4_moe::internal::cpu
