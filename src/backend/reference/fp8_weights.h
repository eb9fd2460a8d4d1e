// The E4M3 weights of activation_format fp8, by definition (docs/explanation/numerics.md, section
// 3).
#pragma once

#include <array>
#include <cstdint>

#include "core/fp8.h"
#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal::reference {

// [block scale byte][code]: e4m3(e2m1 * e4m3 * 2^-shift) in multiples of 2^-9, an integer stored as
// a double.
using Fp8WeightTable = std::array<std::array<double, 16>, 127>;
const Fp8WeightTable& fp8_weight_table(int shift);

// The shift of a matrix, and how many of its weights it rounds. Uses core's type but none of core's
// arithmetic.
Fp8Weights define_fp8_weights(const Nvfp4View& matrix);

}  // namespace nvfp4_moe::internal::reference
