// A packed matrix as the steps multiply it.
#pragma once

#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal::reference {

struct Matrix : Nvfp4View {
  int fp8_shift = 0;  // fp8: weights are e4m3(e2m1 * block scale * 2^-shift), and alpha has 2^shift
};
struct ExpertMatrices {
  Matrix gate, up, down;  // gate has no rows if the activation has no gate
};

}  // namespace nvfp4_moe::internal::reference
