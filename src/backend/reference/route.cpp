// route: expert ids -> the rows of each local expert.
//
// topk_ids (T, k) -> row_of_assignment (T k), assignment_of_row (R), row_offsets (E + 1); clears
// the run's status. Rows of an expert are in increasing token * top_k + k. An id of -1, or of an
// expert on another rank, gets no row. Any other id outside [0, num_experts) is counted and gets no
// row either. The shared part's rows are the tokens.
#include <algorithm>
#include <optional>

#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {

void route(const StepContext& step) {
  const Batch& batch = step.batch;
  const LayerBuffers& buffers = step.buffers;
  const MoeConfig& config = step.weights.config;
  const ExpertRange& range = step.weights.range;
  const int64_t assignments = batch.tokens * config->top_k;
  int64_t* offsets = buffers.routed.row_offsets;

  auto global_id = [&](int64_t assignment) -> int64_t {
    return batch.ids_dtype == DType::kI32 ? static_cast<const int32_t*>(batch.topk_ids)[assignment]
                                          : static_cast<const int64_t*>(batch.topk_ids)[assignment];
  };
  auto local_expert = [&](int64_t assignment) -> std::optional<int64_t> {
    const int64_t id = global_id(assignment);
    if (id < 0 || id >= config->num_experts) return std::nullopt;
    return range.local(id);
  };

  *buffers.status = RunStatus{};
  std::fill_n(offsets, range.count + 1, int64_t{0});
  for (int64_t assignment = 0; assignment < assignments; ++assignment) {
    const int64_t id = global_id(assignment);
    if (id < -1 || id >= config->num_experts) ++buffers.status->bad_expert_ids;
    if (const auto expert = local_expert(assignment)) ++offsets[*expert + 1];
  }
  for (int64_t e = 0; e < range.count; ++e) offsets[e + 1] += offsets[e];

  // offsets[e] advances over e's rows and ends at the start of e + 1, so shifting by one restores
  // it.
  for (int64_t assignment = 0; assignment < assignments; ++assignment) {
    const auto expert = local_expert(assignment);
    buffers.row_of_assignment[assignment] = expert ? static_cast<int32_t>(offsets[*expert]++) : -1;
    if (expert)
      buffers.routed.assignment_of_row[buffers.row_of_assignment[assignment]] =
          static_cast<int32_t>(assignment);
  }
  for (int64_t e = range.count; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;

  if (buffers.shared.experts > 0) {
    buffers.shared.row_offsets[0] = 0;
    buffers.shared.row_offsets[1] = batch.tokens;
  }
}

}  // namespace nvfp4_moe::internal::reference
