// rows_out, router weights -> out: fp32 from 0 in increasing k, then the shared expert, then one rounding.
#include <functional>

#include "backend/cpu/steps.h"

namespace nvfp4_moe::cpu {

void combine(const StepContext& step, const Kernels& kernels) {
  const auto body = [&](int64_t begin, int64_t end) { kernels.combine(step, begin, end); };
  step.executor.parallel_for(step.batch.tokens, 4, std::ref(body));  // by reference: nothing is allocated
}

}  // namespace nvfp4_moe::cpu
