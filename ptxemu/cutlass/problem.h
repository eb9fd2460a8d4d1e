// Products for CUTLASS's kernels, and their expected results: exact integer sums, and bounds
// derived from them.
//
// An element is an integer over 2^unit_bits: of NVFP4 the code in halves times the scale in 2^-9,
// of bf16 a value of few enough exponents. So each product and each sum of products is an int64
// without rounding.
#ifndef PTXEMU_CUTLASS_PROBLEM_H_
#define PTXEMU_CUTLASS_PROBLEM_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

namespace cutlass_oracle {

struct Size {
  int m, n, k;
};

// kExact: fp32 holds every partial sum in every order, so equal bits are expected. kAny: all codes
// and scales.
enum class Data { kExact, kAny };

// One side of a product, (rows, k).
struct Operand {
  int rows, k;
  bool nvfp4;
  std::vector<uint8_t> bytes;    // row-major: E2M1 codes two a byte, the low nibble first, or bf16
  std::vector<uint8_t> scales;   // 128x4 tiles; padding rows hold NaN, padding columns 0
  std::vector<int32_t> values;   // (rows, k): codes in halves, or bf16 in 2^-kBf16Bits
  std::vector<int32_t> factors;  // (rows, k / 16): scales in 2^-9; of bf16 (rows, 1) ones
  int per_factor;                // values that share a factor
};

struct Problem {
  Size size;
  Operand a, b;
  std::vector<uint16_t> c;  // (m, n) bf16; empty if beta is 0
  float alpha, beta, norm;
};

Problem make_problem(const Size& size, bool nvfp4, Data data, bool with_c, std::mt19937& random);

// The sums of one product, row-major (m, n), in units of 2^-sum_bits().
struct Sums {
  std::vector<int64_t> sum, magnitude;  // of products, of their absolute values
  int bits;                             // the unit is 2^-bits
  int steps;  // roundings of an fp32 accumulator: one a matrix instruction
};
Sums exact_sums(const Problem& problem);

// Returns "" if the kernel's output is what the contract of `output` allows, else the first wrong
// element.
std::string judge(const Problem& problem, const Sums& sums, Output output, Data data,
                  const std::vector<uint8_t>& d, const std::vector<uint8_t>& d_scales);

int64_t scale_offset(int row, int column, int columns);  // in 128x4 tiles
int64_t scale_bytes(int rows, int columns);
int output_bits(Output output);

}  // namespace cutlass_oracle

#endif  // PTXEMU_CUTLASS_PROBLEM_H_
