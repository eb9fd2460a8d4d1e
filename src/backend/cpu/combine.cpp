// rows_out, router weights -> out: fp32 from 0 in increasing k, then the shared expert, then one rounding.
#include <functional>

#include "backend/cpu/steps.h"

namespace nvfp4_moe::cpu {

void combine(const HostCall& call, const Kernels& kernels) {
  const auto body = [&](int64_t begin, int64_t end) { kernels.combine(call, begin, end); };
  call.executor.parallel_for(call.batch.tokens, 4, std::ref(body));  // by reference: nothing is allocated
}

}  // namespace nvfp4_moe::cpu
