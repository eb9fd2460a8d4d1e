// Activations in expert order, for configurations whose rows TMA copies: in the place of rows_out, which is free until
// gemm2. What writes them also clears part.intermediate.nonfinite, which gemm1 sets by rows.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe::sm90 {

inline uint16_t* gathered(const PartBuffers& part) { return static_cast<uint16_t*>(part.rows_out); }
// x (T, H) bf16 -> gathered(part) (R, H).
Status gather_rows(const StepContext& step, const PartBuffers& part, const uint16_t* x);

}  // namespace nvfp4_moe::sm90
