// rows_out, router weights -> out: fp32 from 0 in increasing k, then the shared expert, then one
// rounding. Counts nonfinite router weights of rows, and nonfinite elements of out.
#include <cmath>
#include <functional>

#include "backend/cpu/steps.h"

namespace nvfp4_moe::internal::cpu {
namespace {

uint64_t nonfinite_weights(const StepContext& step, int64_t token) {
  const Batch& batch = step.batch;
  const int64_t top_k = step.weights.config->top_k;
  uint64_t count = 0;
  for (int64_t assignment = token * top_k; assignment < (token + 1) * top_k; ++assignment)
    if (step.buffers.row_of_assignment[assignment] >= 0)
      count += !std::isfinite(batch.topk_weights[assignment]);
  if (step.buffers.shared.experts > 0 && batch.shared_weights != nullptr)
    count += !std::isfinite(batch.shared_weights[token]);
  return count;
}

}  // namespace

void combine(const StepContext& step, const Kernels& kernels) {
  RunStatus& status = *step.buffers.status;
  const auto body = [&](int64_t begin, int64_t end) {
    uint64_t weights = 0;
    for (int64_t token = begin; token < end; ++token) weights += nonfinite_weights(step, token);
    add_count(status.nonfinite_weights, weights);
    add_count(status.nonfinite_outputs, kernels.combine(step, begin, end));
  };
  step.executor.parallel_for(step.batch.tokens, 4,
                             std::ref(body));  // by reference: no allocation
}

}  // namespace nvfp4_moe::internal::cpu
