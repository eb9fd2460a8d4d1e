// Measures how weights become E4M3 (core/fp8.h) from counts, for matrices that are counted on a
// device.
#pragma once

#include <array>
#include <cstdint>

#include "core/fp8.h"

namespace nvfp4_moe::internal {

// Histogram of a matrix: codes of each magnitude 0..7 under each block scale.
using Fp8Histogram = std::array<std::array<uint64_t, 8>, 128>;

// The result of measure_fp8_weights for the matrix.
Fp8Weights read_fp8_weights(const Fp8Histogram& codes);

}  // namespace nvfp4_moe::internal
