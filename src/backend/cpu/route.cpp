// Stable counting sort of the assignments by local expert. The only step that reads expert ids.
#include <algorithm>

#include "backend/cpu/steps.h"

namespace nvfp4_moe::internal::cpu {
namespace {

int64_t id_at(const Batch& batch, int64_t assignment) {
  return batch.ids_dtype == DType::kI64 ? static_cast<const int64_t*>(batch.topk_ids)[assignment]
                                        : static_cast<const int32_t*>(batch.topk_ids)[assignment];
}

}  // namespace

void route(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const ExpertRange& range = step.weights.range;
  const LayerBuffers& buffers = step.buffers;
  const int64_t assignments = step.batch.tokens * config->top_k;
  *buffers.status = RunStatus{};

  int64_t* offsets = buffers.routed.row_offsets;
  std::fill(offsets, offsets + range.count + 1, 0);
  for (int64_t assignment = 0; assignment < assignments; ++assignment) {
    const int64_t id = id_at(step.batch, assignment);
    const auto local = range.local(id);
    if (local)
      ++offsets[*local + 1];
    else if (id != -1 && (id < 0 || id >= config->num_experts))
      ++buffers.status->bad_expert_ids;
  }
  for (int64_t e = 0; e < range.count; ++e) offsets[e + 1] += offsets[e];

  // offsets[e] serves as expert e's next free row, then all are shifted back by one expert.
  for (int64_t assignment = 0; assignment < assignments; ++assignment) {
    const auto local = range.local(id_at(step.batch, assignment));
    buffers.row_of_assignment[assignment] = -1;
    if (!local) continue;
    const int64_t row = offsets[*local]++;
    buffers.row_of_assignment[assignment] = static_cast<int32_t>(row);
    buffers.routed.assignment_of_row[row] = static_cast<int32_t>(assignment);
  }
  for (int64_t e = range.count; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;

  if (buffers.shared.experts > 0) {
    buffers.shared.row_offsets[0] = 0;
    buffers.shared.row_offsets[1] = step.batch.tokens;
  }
}

}  // namespace nvfp4_moe::internal::cpu
