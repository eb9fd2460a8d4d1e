// A second implementation of the layer, directly from the contract, as plain long double loops over
// dequantized values. It shares no code with a backend or with core. It is slow, and precise enough
// for the small cases of the table.
#pragma once

#include <cstdint>
#include <vector>

#include "cases/cases.h"

namespace nvfp4_moe::internal::test {

struct OracleResult {
  std::vector<float> out;  // (tokens, hidden_size), rounded to out's type
  RunStatus status;
};
OracleResult oracle_layer(const CaseData& data);

// Pieces that other tests use.
using Real = long double;
double oracle_e2m1(int code);  // 0..15
double oracle_e4m3(int byte);  // 0..0x7E
// (rows, cols) e2m1 * e4m3, without the tensor scale.
std::vector<double> oracle_decode(const uint8_t* codes, const uint8_t* block_scales, int64_t rows,
                                  int64_t cols);
// One rounding to a type: bf16, fp16 or fp32.
Real oracle_round(Real value, DType dtype);
// Half the distance between neighbours of the type at |value|.
double oracle_half_ulp(double value, DType dtype);
// The activation function of the config, without clamps or with them; g is ignored without a gate.
// In double for bounds of fp32: aarch64 computes long double in software.
Real oracle_activation(const MoeOptions& options, Real g, Real u);
double oracle_activation_in_double(const MoeOptions& options, double g, double u);

// One row of activations, quantized: values are the decoded ones without the row scale.
struct OracleRow {
  bool nonfinite = false;
  float scale = 1;  // of the row
  std::vector<double> values;
  uint64_t blocks = 0, saturated = 0, zeroed = 0;
};
// given: 0 = dynamic_token, otherwise the power of two, or the scale of vllm_order.
OracleRow oracle_quantize(const std::vector<double>& x, float given, bool vllm_order);
// fp8: values are E4M3 numbers; given: 0 = dynamic_token, otherwise the power of two.
OracleRow oracle_quantize_fp8(const std::vector<double>& x, float given);
// fp8: the weights of a matrix, and the power of two that alpha has for them.
struct OracleFp8Weights {
  int shift = 0;
  uint64_t inexact = 0;
  std::vector<double> values;  // (rows, cols)
};
OracleFp8Weights oracle_fp8_weights(const Nvfp4View& view);
// int8_block: values are code * scale, exactly; the row scale is 1.
OracleRow oracle_quantize_int8(const std::vector<double>& x);

}  // namespace nvfp4_moe::internal::test
