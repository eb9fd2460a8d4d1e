// The named choices of the case table.
#pragma once

#include <functional>
#include <vector>

#include "cases/cases.h"

namespace nvfp4_moe::internal {

using Setting = std::function<void(Case&)>;

struct Choice {
  const char* name;
  std::vector<Setting> settings;
  // Applies the settings in order.
  void apply(Case& c) const {
    for (const Setting& set : settings) set(c);
  }
};

// The first three, one of each older activation format, run with every data kind, routing and token
// count.
const std::vector<Choice>& plain_choices();
// One expert a token: the router weight multiplies hidden, but not the shared expert's. The first
// three as above.
const std::vector<Choice>& on_input_choices();
// fp8. The first three run with every data kind, the first one with every routing and token count
// too.
const std::vector<Choice>& fp8_choices();
const std::vector<Choice>& fp8_on_input_choices();
// Expert biases, and experts without a gate. The first four, one of each activation format, run
// with every data kind, the first two with every routing and token count too.
const std::vector<Choice>& bias_choices();
const std::vector<Choice>& relu2_choices();
// gelu, gelu_tanh and situ, in each activation format. The first four run with every data kind.
const std::vector<Choice>& gelu_and_situ_choices();

}  // namespace nvfp4_moe::internal
