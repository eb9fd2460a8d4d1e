// What the AVX-512 instruction sets share: bf16 takes its 8-bit multiplication from vnni.
#pragma once

#include "backend/cpu/kernels.h"

namespace nvfp4_moe::cpu::avx512 {

void multiply_int8(const Strip& strip, const Int8Block* const* lines, int64_t count, float* acc);

}  // namespace nvfp4_moe::cpu::avx512
