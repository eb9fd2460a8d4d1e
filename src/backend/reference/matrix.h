// A packed matrix with the shift that the steps need to multiply it.
#pragma once

#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal::reference {

struct Matrix : Nvfp4View {
  // fp8: weights are e4m3(e2m1 * block scale * 2^-shift), and alpha includes 2^shift
  int fp8_shift = 0;
};
struct ExpertMatrices {
  Matrix gate, up, down;  // gate has no rows if the activation has no gate
};

}  // namespace nvfp4_moe::internal::reference
