// Activations in expert order, for configurations whose rows TMA copies. They are stored in
// rows_out, which is unused until gemm2. The kernel that writes them also clears
// part.intermediate.nonfinite, which gemm1 sets by rows.
#pragma once

#include <cstddef>

#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::sm90 {

inline std::byte* gathered(const PartBuffers& part) {
  return static_cast<std::byte*>(part.rows_out);
}
// x (T, H) -> gathered(part) (R, H), as rows of the run's operand. E4M3 needs H of at least 32,
// since its rows are multiples of 64 bytes.
Status gather_rows(const StepContext& step, const PartBuffers& part, const std::byte* x);

}  // namespace nvfp4_moe::internal::sm90
