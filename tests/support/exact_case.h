// Whole layers in which every sum is exact in fp32, in any order and however wide a tensor core
// adds: every backend's output has the reference's bits.
//
// Columns of hidden come in pairs of one value, and the weights of gate and up in pairs (w, -w), so
// that all products count and cancel. The rest of gate is 36 times a power of two, with a SiLU
// equal to itself in fp32; the rest of up is twice one value of hidden. So the intermediate is 9
// times a small power of two times an E2M1 value: exact in bf16, with block scales that are exact
// in E4M3. The products of gemm2 are whole multiples of one step, and their sums are below 2^24 of
// them.
#pragma once

#include <cstdint>

#include "cases/cases.h"

namespace nvfp4_moe::internal::test {

// Multiples of 16; hidden from 64 on.
struct ExactSizes {
  int64_t experts = 4, top_k = 2;
  int64_t hidden = 1040, intermediate = 336;  // neither a multiple of a tile or k-block
};

// batch_invariant: no tile is split along K.
CaseData exact_case(const ExactSizes& sizes, ActivationFormat format, int64_t tokens,
                    bool batch_invariant = false);

}  // namespace nvfp4_moe::internal::test
