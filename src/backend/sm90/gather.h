// Lines of tokens in the order of the rows, for variants that copy whole boxes of them: in the place of rows_out, which
// is free until gemm2. Who writes them also clears the flags of rows that gemm1 sets.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe::sm90 {

inline uint16_t* gathered(const PartBuffers& part) { return static_cast<uint16_t*>(part.rows_out); }
// x (T, H) bf16 -> (R, H), which it returns.
const uint16_t* gather_rows(const StepContext& step, const PartBuffers& part, const uint16_t* x);

// quantize as the walk calls it: hidden goes to the rows at once, where nothing else needs it. The same call's answer
// for gemm1.
bool quantizes_into_rows(const StepContext& step);
void quantize_into_rows(const StepContext& step);

}  // namespace nvfp4_moe::sm90
