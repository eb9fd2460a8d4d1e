// Lines of tokens in the order of the rows, for variants that copy whole boxes of them.
#pragma once

#include "backend/host_layer.h"

namespace nvfp4_moe::sm90 {

// x (T, H) bf16 -> (R, H), which it returns: the place of part.rows_out, free until gemm2.
const uint16_t* gather_rows(const HostCall& call, const HostPart& part, const uint16_t* x);

}  // namespace nvfp4_moe::sm90
