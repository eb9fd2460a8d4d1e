// rows_out, router weights -> out: fp32 from 0 in increasing k, then the shared expert, then one rounding.
#include <cmath>
#include <functional>

#include "backend/cpu/activations.h"
#include "backend/cpu/steps.h"

namespace nvfp4_moe::cpu {

void combine(const HostCall& call) {
  const MoeOptions& options = call.weights.config.options();
  const DType row_dtype = options.row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  const int64_t hidden = options.hidden_size;
  const bool before_down = options.router_weight == RouterWeight::kBeforeDown;
  const HostPart& shared = call.buffers.shared;
  const auto body = [&](int64_t begin, int64_t end) {
    float acc[16], values[16];
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t h = 0; h < hidden; h += 16) {
        for (float& value : acc) value = 0.0f;
        for (int64_t choice = token * options.top_k; choice < (token + 1) * options.top_k; ++choice) {
          const int64_t row = call.buffers.row_of_choice[choice];
          if (row < 0) continue;
          load16(call.buffers.routed.rows_out, row_dtype, row * hidden + h, values);
          const float weight = before_down ? 1.0f : call.batch.topk_weights[choice];
          for (int i = 0; i < 16; ++i) acc[i] = before_down ? acc[i] + values[i] : std::fma(weight, values[i], acc[i]);
        }
        if (shared.experts > 0) {
          load16(shared.rows_out, row_dtype, token * hidden + h, values);
          const float* weight = call.batch.shared_weights;
          for (int i = 0; i < 16; ++i)
            acc[i] = weight == nullptr ? acc[i] + values[i] : std::fma(weight[token], values[i], acc[i]);
        }
        for (int i = 0; i < 16; ++i) store(call.batch.out, call.batch.out_dtype, token * hidden + h + i, acc[i]);
      }
    }
  };
  call.executor.parallel_for(call.batch.tokens, 4, std::ref(body));  // by reference: nothing is allocated
}

}  // namespace nvfp4_moe::cpu
