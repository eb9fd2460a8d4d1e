// The quantizers of the numeric contract: float rows in, NVFP4 codes and block scales out.
//
// x is (rows, cols) row-major float, cols a multiple of 16. codes is (rows, cols/2), block_scales
// (rows, cols/16). int8_block, the only format here that is not NVFP4, has int8 codes (rows, cols)
// and fp32 scales (rows, cols/16). A block whose scale rounds to 0 has all codes 0, for any values.
// Each function counts what it saturates; it adds to counters and never resets them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/config.h"
#include "core/enum_names.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct QuantizeCounts {
  uint64_t blocks = 0;
  uint64_t saturated_scales = 0;  // blocks whose exact scale is above 448
  uint64_t zero_scales = 0;       // blocks that are not all zero but whose scale rounds to 0
  uint64_t saturated_codes = 0;   // elements whose quotient is above 6
  uint64_t nonfinite_rows = 0;    // rows that hold NaN or Inf

  QuantizeCounts& operator+=(const QuantizeCounts& other);
};

enum class ScaleSearch : uint8_t {
  kMax,  // block scale = RNE(amax / (6 s))
  kMse,  // the E4M3 neighbours of amax/6 and of amax/4 (over s) compete by squared error; ties go
         // to the scale of kMax
  // Among all positive E4M3 values, the one of least squared error; ties go to the scale of kMax,
  // then to the smallest.
  kSweep,
};

// Sources of a tensor scale, by the names of docs/explanation/numerics.md.
enum class QuantizeMode : uint8_t {
  kWeights,  // a given number, or amax / 2688 of the whole array; block scales by a ScaleSearch
  kDynamicToken,  // each row's own power of two
  kStatic,        // a given number, rounded up to a power of two
  kVllmOrder,     // a given number as it is, in vLLM's operation order
};

const char* to_string(ScaleSearch);
const char* to_string(QuantizeMode);

template <>
struct EnumNames<ScaleSearch> {
  static constexpr const char* kWhat = "search";
  static constexpr std::array kAll = {"max", "mse", "sweep"};
};
template <>
struct EnumNames<QuantizeMode> {
  static constexpr const char* kWhat = "mode";
  static constexpr std::array kAll = {"weights", "dynamic_token", "static", "vllm_order"};
};

// s = fl32(amax / 2688), computed in double; 1 if that is 0.
float tensor_scale_from_amax(double amax);

// Quantizes weights: block scale = RNE(amax / (6 s)), code = RNE(x / (scale s)), both in double and
// rounded once. s is any positive finite float. sum_sq_error and sum_sq (each may be null) receive
// additions for an SQNR; these two sums have no weights.
//
// channel_weights: (cols) or none. If given, kMse and kSweep compare the sum of weight_c (x -
// decoded)^2. That is the error of the product with inputs whose channels are uncorrelated and have
// these second moments. A scale that clips (amax above 6 s times the next E4M3 value) is then taken
// only if the block's plain error is at most that of kMax. Refused under kMax, and if weights are
// negative or not finite.
//
// A NaN or Inf in x is a bad_input that names its row and column. Rows before it have then been
// written, and rows from it on have not.
Status quantize_weights(std::span<const float> x, int64_t rows, int64_t cols, float tensor_scale,
                        ScaleSearch search, uint8_t* codes, uint8_t* block_scales,
                        QuantizeCounts& counts, double* sum_sq = nullptr,
                        double* sum_sq_error = nullptr,
                        std::span<const float> channel_weights = {});

// Quantizes one row in exact mode: s = 2^k. byte = e4m3(A 2^-k c), c = fl32(1/6) = 0x3E2AAAAB; code
// = e2m1(fl32(x 2^-k / v)). Source: docs/explanation/format.md. Returns false, with all codes and
// scales 0, if the row holds NaN or Inf.
bool quantize_row_exact(std::span<const float> x, float power_of_two_scale, uint8_t* codes,
                        uint8_t* block_scales, QuantizeCounts& counts);

// The row's own scale: the smallest power of two >= amax/2688, 1 for a row of zeros, never below
// 2^-126. NaN if amax is not finite, so that an alpha built from it makes the row NaN.
float dynamic_token_scale(float amax);
// The same for fp8: the smallest power of two >= amax/448. Source: docs/explanation/numerics.md,
// section 3.
float fp8_token_scale(float amax);
// max |x|; NaN if any element is NaN, Inf if any is Inf (and none NaN).
float row_amax(std::span<const float> x);

// Quantizes one row in vLLM's operation order (csrc nvfp4_utils.cuh), with rcp modelled as the
// correctly rounded reciprocal: G = 1/input_scale; byte = e4m3(G * (A * rcp(6))); code = e2m1(x *
// rcp(v * rcp(G))), 0 if v is 0. Returns false, with all codes and scales 0, if the row holds NaN
// or Inf.
bool quantize_row_vllm_order(std::span<const float> x, float input_scale, uint8_t* codes,
                             uint8_t* block_scales, QuantizeCounts& counts);

// The smallest scale of an int8_block block. Half of it times the smallest E4M3 value, 2^-9, is
// still a normal fp32, so no kernel that multiplies block scales sees a subnormal. Blocks of zeros
// have it too.
inline constexpr float kInt8BlockMinScale = 0x1p-116f;

// Quantizes one row to int8_block: s = max(fl32(A / 127), 2^-116), code = RNE(fl32(x / s)), which
// never exceeds +-127. zero_scales counts blocks that are not all zero but whose codes are. Source:
// docs/explanation/format.md. Returns false, with all codes 0 and all scales NaN, if the row holds
// NaN or Inf.
bool quantize_row_int8_block(std::span<const float> x, int8_t* codes, float* block_scales,
                             QuantizeCounts& counts);

// The smallest power of two s >= 2^-126 with bound <= range s, exactly. Precondition: 0 < bound <=
// 2^127 range.
float power_of_two_scale(double bound, double range);
// The smallest power of two >= 2^-126 that gives the format's rows the range of NVFP4 rows under
// factor * input_scale, which is 2688 times that number. kInvalidArgument, with `name` in front, if
// the scale would exceed 2^127. The format has row scales; input_scale and factor are positive and
// finite, and factor is a power of two.
Result<float> static_row_scale(ActivationFormat format, std::string_view name, float input_scale,
                               float factor);
bool is_power_of_two(float x);  // positive, finite, normal

}  // namespace nvfp4_moe::internal
