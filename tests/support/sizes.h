// A layer's sizes, with everything else at its default.
#pragma once

#include "core/config.h"

namespace nvfp4_moe::internal::test {

inline MoeOptions sizes_of(int64_t experts, int64_t top_k, int64_t hidden = 0,
                           int64_t intermediate = 0) {
  MoeOptions options;
  options.num_experts = experts;
  options.top_k = top_k;
  options.hidden_size = hidden;
  options.intermediate_size = intermediate;
  return options;
}

}  // namespace nvfp4_moe::internal::test
