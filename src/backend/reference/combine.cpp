// combine: rows_out (R, H), topk_weights (T, k) -> out (T, H).
//
// acc = fma(weight, row, acc) in fp32, from 0, in increasing k over the assignments that have a
// row; acc + row under before_down and on_input, when the row already includes the weight. Then the
// shared expert's row is added, and the result is rounded once to out's type. A token without rows
// gives zeros. Counts nonfinite router weights of rows, and nonfinite elements of out.
#include <cmath>
#include <functional>

#include "backend/reference/formats.h"
#include "backend/reference/quantize_row.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {

void combine(const StepContext& step) {
  const Batch& batch = step.batch;
  const LayerBuffers& buffers = step.buffers;
  const MoeConfig& config = step.weights.config;
  const int64_t hidden = config->hidden_size, top_k = config->top_k;
  const bool after_down = config->router_weight == RouterWeight::kAfterDown;
  const DType row_dtype = config->row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;

  auto element = [&](int64_t token, int64_t channel) {
    float acc = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t assignment = token * top_k + k, row = buffers.row_of_assignment[assignment];
      if (row < 0) continue;
      const auto value =
          static_cast<float>(load(buffers.routed.rows_out, row_dtype, row * hidden + channel));
      acc = after_down ? std::fma(batch.topk_weights[assignment], value, acc) : acc + value;
    }
    if (buffers.shared.experts > 0) {
      const auto value =
          static_cast<float>(load(buffers.shared.rows_out, row_dtype, token * hidden + channel));
      acc = batch.shared_weights != nullptr ? std::fma(batch.shared_weights[token], value, acc)
                                            : acc + value;
    }
    return acc;
  };
  auto nonfinite_weights = [&](int64_t token) {
    uint64_t count = 0;
    for (int64_t assignment = token * top_k; assignment < (token + 1) * top_k; ++assignment)
      count += buffers.row_of_assignment[assignment] >= 0 &&
               !std::isfinite(batch.topk_weights[assignment]);
    if (buffers.shared.experts > 0 && batch.shared_weights != nullptr)
      count += !std::isfinite(batch.shared_weights[token]);
    return count;
  };
  auto body = [&](int64_t begin, int64_t end) {
    uint64_t weights = 0, outputs = 0;
    for (int64_t token = begin; token < end; ++token) {
      weights += nonfinite_weights(token);
      for (int64_t at = token * hidden; at < (token + 1) * hidden; ++at) {
        store(batch.out, batch.out_dtype, at, element(token, at - token * hidden));
        outputs += !std::isfinite(load(batch.out, batch.out_dtype, at));
      }
    }
    add_count(buffers.status->nonfinite_weights, weights);
    add_count(buffers.status->nonfinite_outputs, outputs);
  };
  step.executor.parallel_for(batch.tokens, 4, std::ref(body));
}

}  // namespace nvfp4_moe::internal::reference
