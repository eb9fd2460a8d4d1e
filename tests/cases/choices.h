// What the choices of the case table are made of.
#pragma once

#include <functional>
#include <vector>

#include "cases/cases.h"

namespace nvfp4_moe::internal {

struct Choice {
  const char* name;
  std::function<void(Case&)> apply;
};

// Limits low enough that many values reach them.
inline void clamp(Case& c, Activation activation, float limit) {
  c.options.activation = activation;
  c.options.swiglu_limit = limit;
}
inline void before_down(Case& c) {
  c.options.router_weight = RouterWeight::kBeforeDown;
  c.options.max_router_weight = 2.5f;
}

inline void shared(Case& c, int64_t intermediate_size) {
  c.options.shared_intermediate_size = intermediate_size;
  c.shared_weights = true;
}

// fp8_choices.cpp: of fp8, after every other case of the table, so that those keep their turns and seeds. The first three
// run with every data kind, the first one also routings and token counts.
const std::vector<Choice>& fp8_choices();
// Of one expert a token, under on_input.
const std::vector<Choice>& fp8_on_input_choices();

// bias_choices.cpp: of expert biases, after every case without them, so that those keep their turns and seeds. The first
// four, one of each activation format, run with every data kind, the first two routings and token counts too.
const std::vector<Choice>& bias_choices();

// relu2_choices.cpp: of relu2, after every other case, so that those keep their turns and seeds. The first four, one of
// each activation format, run with every data kind, the first two routings and token counts too.
const std::vector<Choice>& relu2_choices();
}  // namespace nvfp4_moe::internal
