// Long because it is the whole layer a second time and shares no statement with the first.
#include "support/spec_oracle.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

namespace nvfp4_moe::internal::test {
namespace {

constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
constexpr double kUnknown = -1000;  // not an E4M3 number
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// The value of an activation element by the IEEE formulas of its type.
double element(const std::vector<uint8_t>& bytes, DType dtype, int64_t index) {
  const bool wide = dtype == DType::kF32;
  uint32_t bits = 0;
  std::memcpy(&bits, bytes.data() + index * (wide ? 4 : 2), wide ? 4 : 2);
  const int fraction_bits = wide ? 23 : dtype == DType::kBf16 ? 7 : 10;
  const int exponent_bits = dtype == DType::kF16 ? 5 : 8;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const auto fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1));
  const double sign = (bits >> (fraction_bits + exponent_bits)) & 1 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign *
         std::ldexp(fraction + std::ldexp(1.0, fraction_bits), exponent - bias - fraction_bits);
}

// The index with the value times unit nearest to magnitude, ties to the even index, by trying all
// of them.
template <class T>
int nearest(T magnitude, T unit, int count, double (*value_of)(int)) {
  int best = 0;
  T least = std::fabs(magnitude - unit * value_of(0));
  for (int i = 1; i < count; ++i) {
    const T distance = std::fabs(magnitude - unit * value_of(i));
    if (distance < least || (distance == least && i % 2 == 0)) {
      best = i;
      least = distance;
    }
  }
  return best;
}

template <class T>
T activation(const MoeOptions& options, T g, T u) {
  const T limit = options.swiglu_limit.value_or(0);
  auto silu = [](T x) { return x / (1 + std::exp(-x)); };
  auto minimum = [](T x, T most) { return x > most ? most : x; };
  auto clamp = [&](T x) { return x < -limit ? -limit : minimum(x, limit); };
  switch (options.activation) {
    case Activation::kSwiglu: return silu(g) * u;
    case Activation::kSwigluClamped: return silu(minimum(g, limit)) * clamp(u);
    case Activation::kSwigluStep: return minimum(silu(g), limit) * clamp(u);
    case Activation::kSwigluOai: {
      const T gate = minimum(g, limit);
      return gate / (1 + std::exp(-static_cast<T>(options.swiglu_alpha) * gate)) * (clamp(u) + 1);
    }
    case Activation::kRelu2: return std::isnan(u) ? u : std::pow(std::max(u, T{0}), T{2});
    case Activation::kGelu: return g * std::erfc(-g * std::sqrt(T{0.5})) / 2 * u;
    case Activation::kGeluTanh: {
      const T pi = std::acos(T{-1}),
              y = std::sqrt(2 / pi) * (g + static_cast<T>(0.044715L) * g * g * g);
      return g / (1 + std::exp(-2 * y)) * u;
    }
    case Activation::kSitu: {
      const T b = *options.situ_gate_limit, l = *options.situ_up_limit;
      return b * std::tanh(g / b) / (1 + std::exp(-g)) * l * std::tanh(u / l);
    }
  }
  return std::numeric_limits<T>::quiet_NaN();
}

// Every code or byte's value, by the IEEE formulas of its type.
template <size_t kCount>
std::array<double, kCount> values_of(int fraction_bits, int bias) {
  std::array<double, kCount> values{};
  for (size_t i = 0; i < kCount; ++i) {
    const int exponent = static_cast<int>(i) >> fraction_bits,
              mantissa = static_cast<int>(i) & ((1 << fraction_bits) - 1);
    const int significand = exponent == 0 ? mantissa : mantissa + (1 << fraction_bits);
    values[i] = std::ldexp(significand, std::max(exponent, 1) - bias - fraction_bits);
  }
  return values;
}
const std::array<double, 8> kE2m1 = values_of<8>(1, 1);
const std::array<double, 128> kE4m3 = values_of<128>(3, 7);

struct Scales {  // as defined in docs/explanation/numerics.md
  float hidden = 0, intermediate = 0;
};

// The smallest power of two >= x.
float power_of_two_above(Real x) {
  float power = 0x1p-126f;
  while (power < x) power *= 2;
  return power;
}

Scales given_scales(const CaseData& data) {
  const MoeOptions& o = data.spec.options;
  // An input_scale of 1 means a largest magnitude of 2688; a row scale of 1 holds 2688 under nvfp4
  // and 448 under fp8.
  const Real range = o.activation_format == ActivationFormat::kFp8 ? 448 : 2688;
  const Real of_input_scale = 2688 / range;
  Scales scales;
  if (o.activation_scale == ActivationScale::kStatic)
    scales.hidden = power_of_two_above(of_input_scale * *data.scales.hidden) * o.static_headroom;
  if (o.activation_scale == ActivationScale::kVllmOrder) scales.hidden = *data.scales.hidden;
  if (o.intermediate_scale == IntermediateScale::kVllmOrder)
    scales.intermediate = *data.scales.intermediate;
  if (o.intermediate_scale == IntermediateScale::kFixed) {
    if (o.intermediate_fixed) {
      scales.intermediate = *o.intermediate_fixed;
    } else if (o.swiglu_limit || o.situ_gate_limit) {
      const bool situ = o.activation == Activation::kSitu;
      const Real limit = situ ? *o.situ_gate_limit : *o.swiglu_limit;
      Real bound = limit * (situ ? *o.situ_up_limit : limit);
      if (o.activation == Activation::kSwigluOai) bound = limit * (limit + 1);
      if (o.router_weight == RouterWeight::kBeforeDown)
        bound *= std::max(1.0f, o.max_router_weight);
      scales.intermediate = power_of_two_above(bound / range);
    } else {
      scales.intermediate = 16 * power_of_two_above(of_input_scale * *data.scales.intermediate);
    }
  }
  return scales;
}

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;
  Real scale = 1;  // the tensor scale, times 2^shift under fp8
};
Matrix decoded(const Nvfp4View& view, ActivationFormat format) {
  if (format != ActivationFormat::kFp8)
    return {view.rows, view.cols,
            oracle_decode(view.codes, view.block_scales, view.rows, view.cols), view.tensor_scale};
  OracleFp8Weights fp8 = oracle_fp8_weights(view);
  return {view.rows, view.cols, std::move(fp8.values),
          std::ldexp(static_cast<Real>(view.tensor_scale), fp8.shift)};
}

// alpha * dot, alpha rounded to fp32; under bf16 and int8_block the row has no scale.
Real product(const OracleRow& x_row, const Matrix& w, int64_t n) {
  Real sum = 0;
  for (int64_t k = 0; k < w.cols; ++k)
    sum += static_cast<Real>(x_row.values[static_cast<size_t>(k)]) *
           w.values[static_cast<size_t>(n * w.cols + k)];
  return sum * static_cast<float>(static_cast<Real>(x_row.scale) * w.scale);
}

struct Expert {
  Matrix gate, up, down;
  ExpertBiases biases;
};

// A GEMM's value in fp32 with its bias added in fp32; without biases the value rounded to dtype.
Real with_bias(Real value, const float* bias, int64_t n, DType dtype) {
  if (bias == nullptr) return oracle_round(value, dtype);
  return oracle_round(oracle_round(oracle_round(value, DType::kF32) + bias[n], DType::kF32), dtype);
}

// Sets the values to zeros and notes whether a number is not finite; returns the largest magnitude.
Real begin_row(const std::vector<double>& x, OracleRow& row) {
  row.values.assign(x.size(), 0.0);
  Real amax = 0;
  for (double value : x) {
    if (!std::isfinite(value)) row.nonfinite = true;
    amax = std::max(amax, static_cast<Real>(std::fabs(value)));
  }
  return amax;
}

// The row in the config's format; `vllm_order` only matters under nvfp4.
OracleRow quantized(const MoeOptions& o, const std::vector<double>& x, float given,
                    bool vllm_order) {
  switch (o.activation_format) {
    case ActivationFormat::kNvfp4: return oracle_quantize(x, given, vllm_order);
    case ActivationFormat::kInt8Block: return oracle_quantize_int8(x);
    case ActivationFormat::kFp8: return oracle_quantize_fp8(x, given);
    case ActivationFormat::kBf16: break;
  }
  OracleRow row;
  begin_row(x, row);
  for (size_t i = 0; i < x.size(); ++i)
    row.values[i] = static_cast<double>(oracle_round(x[i], DType::kBf16));
  return row;
}

// One row: row `x` of hidden after one expert, in row_format; all NaN if it must be.
std::vector<Real> expert_row(const CaseData& data, const Scales& scales, const Expert& expert,
                             const OracleRow& x, Real router_weight, RunStatus& status) {
  const MoeOptions& o = data.spec.options;
  std::vector<double> h(static_cast<size_t>(expert.up.rows));
  bool finite = true;
  for (int64_t i = 0; i < expert.up.rows; ++i) {
    const Real g = expert.gate.rows == 0
                       ? 0
                       : with_bias(product(x, expert.gate, i), expert.biases.gate, i, DType::kF32);
    const Real u = with_bias(product(x, expert.up, i), expert.biases.up, i, DType::kF32);
    const Real value =
        x.nonfinite ? kNan : oracle_round(oracle_activation(o, g, u) * router_weight, DType::kBf16);
    h[static_cast<size_t>(i)] = static_cast<double>(value);
    finite = finite && std::isfinite(value);
  }
  status.nonfinite_rows += finite ? 0 : 1;
  OracleRow x_row =
      quantized(o, h, scales.intermediate, o.intermediate_scale == IntermediateScale::kVllmOrder);
  if (o.activation_format == ActivationFormat::kBf16) x_row.nonfinite = false;  // NaN by itself
  status.intermediate_blocks += x_row.blocks;
  status.intermediate_saturated += x_row.saturated;
  status.intermediate_zeroed += x_row.zeroed;
  std::vector<Real> row(static_cast<size_t>(o.hidden_size));
  const DType dtype = o.row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  for (int64_t c = 0; c < o.hidden_size; ++c)
    row[static_cast<size_t>(c)] =
        x_row.nonfinite ? kNan
                        : with_bias(product(x_row, expert.down, c), expert.biases.down, c, dtype);
  return row;
}

// weight: null, or the factor of hidden, in hidden's own dtype.
OracleRow hidden_row(const CaseData& data, const Scales& scales, int64_t token, const float* weight,
                     RunStatus& status) {
  const MoeOptions& o = data.spec.options;
  std::vector<double> x(static_cast<size_t>(o.hidden_size));
  for (int64_t c = 0; c < o.hidden_size; ++c) {
    double& value = x[static_cast<size_t>(c)];
    value = element(data.hidden, data.spec.hidden_dtype, token * o.hidden_size + c);
    if (weight != nullptr)
      value = static_cast<double>(oracle_round(
          value * oracle_round(*weight, data.spec.hidden_dtype), data.spec.hidden_dtype));
  }
  OracleRow x_row =
      quantized(o, x, scales.hidden, o.activation_scale == ActivationScale::kVllmOrder);
  status.hidden_blocks += x_row.blocks;
  status.hidden_saturated += x_row.saturated;
  status.hidden_zeroed += x_row.zeroed;
  return x_row;
}

}  // namespace

double oracle_e2m1(int code) {
  return code & 8 ? -kE2m1[static_cast<size_t>(code & 7)] : kE2m1[static_cast<size_t>(code)];
}

double oracle_e4m3(int byte) { return kE4m3[static_cast<size_t>(byte)]; }

std::vector<double> oracle_decode(const uint8_t* codes, const uint8_t* block_scales, int64_t rows,
                                  int64_t cols) {
  std::vector<double> values(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int byte = codes[i / 2];
    values[static_cast<size_t>(i)] =
        oracle_e2m1(i % 2 == 0 ? byte & 15 : byte >> 4) * oracle_e4m3(block_scales[i / 16]);
  }
  return values;
}

double oracle_half_ulp(double value, DType dtype) {
  const int precision = dtype == DType::kF32 ? 24 : dtype == DType::kBf16 ? 8 : 11;
  const int least = dtype == DType::kF16 ? -14 : -126;
  const int exponent = value == 0 ? least : std::max(std::ilogb(value), least);
  return std::ldexp(1.0, exponent - precision);
}

Real oracle_round(Real value, DType dtype) {
  if (value == 0 || !std::isfinite(value)) return value;
  const Real ulp = 2 * oracle_half_ulp(static_cast<double>(value), dtype);
  // The double above may be one binade up from value; the finer grid decides then.
  const Real steps = value / ulp, below = std::floor(steps), rest = steps - below;
  const bool up = rest > Real{0.5} || (rest == Real{0.5} && std::fmod(below, Real{2}) != 0);
  const Real rounded = (up ? below + 1 : below) * ulp;
  const Real largest = dtype == DType::kF16 ? 65504 : std::ldexp(Real{1}, 128);
  if (dtype == DType::kF16 ? std::fabs(rounded) > largest : std::fabs(rounded) >= largest)
    return value < 0 ? -kInfinity : kInfinity;
  return rounded == 0 && value < 0 ? -Real{0} : rounded;
}

Real oracle_activation(const MoeOptions& options, Real g, Real u) {
  return activation<Real>(options, g, u);
}

double oracle_activation_in_double(const MoeOptions& options, double g, double u) {
  return activation<double>(options, g, u);
}

OracleRow oracle_quantize(const std::vector<double>& x, float given, bool vllm_order) {
  OracleRow x_row;
  const Real amax = begin_row(x, x_row);
  if (x_row.nonfinite) return x_row;
  x_row.scale = given != 0 ? given : amax == 0 ? 1.0f : power_of_two_above(amax / 2688);
  const float encode = 1.0f / x_row.scale;
  for (size_t b = 0; b < x.size(); b += 16) {
    Real block_amax = 0;
    for (size_t i = b; i < b + 16; ++i)
      block_amax = std::max(block_amax, static_cast<Real>(std::fabs(x[i])));
    int byte = 0;
    if (vllm_order) {
      const float scale = encode * (static_cast<float>(block_amax) * (1.0f / 6.0f));
      byte = nearest<Real>(scale, 1, 127, oracle_e4m3);
      x_row.saturated += scale > 448;
    } else {
      byte = nearest<Real>(block_amax, 6 * static_cast<Real>(x_row.scale), 127, oracle_e4m3);
      x_row.saturated += block_amax > static_cast<Real>(2688) * x_row.scale;
    }
    const Real v = oracle_e4m3(byte);
    x_row.blocks += 1;
    x_row.zeroed += byte == 0 && block_amax > 0;
    for (size_t i = b; byte != 0 && i < b + 16; ++i) {
      int code = 0;
      if (vllm_order) {
        const float quotient =
            static_cast<float>(x[i]) * (1.0f / (static_cast<float>(v) * (1.0f / encode)));
        code = nearest<Real>(std::fabs(quotient), 1, 8, oracle_e2m1);
      } else {
        code = nearest<Real>(std::fabs(x[i]), v * static_cast<Real>(x_row.scale), 8, oracle_e2m1);
      }
      x_row.values[i] = static_cast<double>((x[i] < 0 ? -1 : 1) * oracle_e2m1(code) * v);
    }
  }
  return x_row;
}

OracleRow oracle_quantize_fp8(const std::vector<double>& x, float given) {
  OracleRow x_row;
  const Real amax = begin_row(x, x_row);
  if (x_row.nonfinite) return x_row;
  x_row.scale = given != 0 ? given : amax == 0 ? 1.0f : power_of_two_above(amax / 448);
  for (size_t b = 0; b < x.size(); b += 16) {
    bool saturated = false, zero = true, zero_codes = true;
    for (size_t i = b; i < b + 16; ++i) {
      const int byte = nearest<Real>(std::fabs(x[i]), x_row.scale, 127, oracle_e4m3);
      x_row.values[i] = static_cast<double>((x[i] < 0 ? -1 : 1) * oracle_e4m3(byte));
      saturated = saturated || std::fabs(x[i]) > 448 * static_cast<Real>(x_row.scale);
      zero = zero && x[i] == 0;
      zero_codes = zero_codes && byte == 0;
    }
    x_row.blocks += 1;
    x_row.saturated += saturated;
    x_row.zeroed += zero_codes && !zero;
  }
  return x_row;
}

OracleFp8Weights oracle_fp8_weights(const Nvfp4View& view) {
  OracleFp8Weights weights;
  const int64_t count = view.rows * view.cols;
  double largest = 0;
  for (int64_t i = 0; i < count / 16; ++i)
    largest = std::max(largest, oracle_e4m3(view.block_scales[i]));
  // Starts far above any matrix's shift and goes down as long as the largest still fits.
  if (largest > 0)
    for (weights.shift = 40; std::ldexp(6 * largest, 1 - weights.shift) <= 448;) --weights.shift;
  // By shift, [byte][code]: (value, whether it is inexact), computed when first needed.
  thread_local std::map<int, std::vector<std::pair<double, bool>>> known;
  std::vector<std::pair<double, bool>>& rounded = known[weights.shift];
  rounded.resize(128 * 16, {kUnknown, false});
  weights.values.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int code = view.codes[i / 2] >> (i % 2 * 4) & 15, byte = view.block_scales[i / 16];
    auto& [value, inexact] = rounded[static_cast<size_t>(byte * 16 + code)];
    if (value == kUnknown) {
      // Both factors have four bits and the neighbours of a tie have few: exact in double.
      const double exact = std::ldexp(oracle_e2m1(code) * oracle_e4m3(byte), -weights.shift);
      value =
          (code & 8 ? -1 : 1) * oracle_e4m3(nearest<double>(std::fabs(exact), 1, 127, oracle_e4m3));
      inexact = value != exact;
    }
    weights.values.push_back(value);
    weights.inexact += inexact;
  }
  return weights;
}

OracleRow oracle_quantize_int8(const std::vector<double>& x) {
  OracleRow x_row;
  begin_row(x, x_row);
  if (x_row.nonfinite) return x_row;
  for (size_t b = 0; b < x.size(); b += 16) {
    Real amax = 0;
    for (size_t i = b; i < b + 16; ++i) amax = std::max(amax, static_cast<Real>(std::fabs(x[i])));
    const Real scale =
        std::max(oracle_round(amax / 127, DType::kF32), static_cast<Real>(0x1p-116L));
    bool zero = true;
    for (size_t i = b; i < b + 16; ++i) {
      // The integer nearest to the fp32 quotient, by trying all of them.
      const Real quotient = oracle_round(std::fabs(x[i]) / scale, DType::kF32);
      const int code = nearest<Real>(quotient, 1, 128, [](int integer) { return double(integer); });
      zero = zero && code == 0;
      x_row.values[i] = static_cast<double>((x[i] < 0 ? -1 : 1) * code * scale);
    }
    x_row.blocks += 1;
    x_row.zeroed += zero && amax > 0;
  }
  return x_row;
}

OracleResult oracle_layer(const CaseData& data) {
  const MoeOptions& o = data.spec.options;
  const bool row_scales = o.activation_format == ActivationFormat::kNvfp4 ||
                          o.activation_format == ActivationFormat::kFp8;
  const Scales scales = row_scales ? given_scales(data) : Scales{};
  std::map<int64_t, Expert> experts;  // by local index, decoded when first needed
  auto expert = [&](int64_t local) -> const Expert& {
    auto [it, fresh] = experts.try_emplace(local);
    const ExpertSource source = data.expert(local);
    if (fresh)
      it->second = {decoded(source.gate, o.activation_format),
                    decoded(source.up, o.activation_format),
                    decoded(source.down, o.activation_format), source.biases};
    return it->second;
  };
  const bool before = o.router_weight == RouterWeight::kBeforeDown,
             on_input = o.router_weight == RouterWeight::kOnInput;
  OracleResult result;
  result.out.resize(static_cast<size_t>(data.spec.tokens * o.hidden_size));
  for (int64_t t = 0; t < data.spec.tokens; ++t) {
    OracleRow x;
    bool quantized = false, nonfinite = false;
    std::vector<float> acc(static_cast<size_t>(o.hidden_size), 0.0f);
    auto add = [&](int64_t local, const float* weight_on_input, Real weight_before,
                   const float* weight_after) {
      if (!quantized || on_input) x = hidden_row(data, scales, t, weight_on_input, result.status);
      quantized = true;
      nonfinite = nonfinite || x.nonfinite;
      const std::vector<Real> row =
          expert_row(data, scales, expert(local), x, weight_before, result.status);
      for (size_t c = 0; c < acc.size(); ++c) {
        const auto value = static_cast<float>(row[c]);
        acc[c] = weight_after != nullptr ? std::fma(*weight_after, value, acc[c]) : acc[c] + value;
      }
    };
    for (int64_t k = 0; k < o.top_k; ++k) {
      const int64_t id = data.id(t, k);
      if (id < -1 || id >= o.num_experts) result.status.bad_expert_ids += 1;
      if (id < data.spec.range.first || id >= data.spec.range.first + data.spec.range.count)
        continue;
      const float& weight = data.topk_weights[static_cast<size_t>(t * o.top_k + k)];
      result.status.nonfinite_weights += std::isfinite(weight) ? 0 : 1;
      add(id - data.spec.range.first, on_input ? &weight : nullptr, before ? weight : 1.0f,
          before || on_input ? nullptr : &weight);
    }
    if (o.shared_intermediate_size > 0) {
      const float* const weight =
          data.shared_weights.empty() ? nullptr : &data.shared_weights[static_cast<size_t>(t)];
      result.status.nonfinite_weights += weight == nullptr || std::isfinite(*weight) ? 0 : 1;
      add(kSharedExpert, nullptr, 1.0f, weight);
    }
    result.status.nonfinite_tokens += nonfinite ? 1 : 0;
    for (int64_t c = 0; c < o.hidden_size; ++c) {
      float& out = result.out[static_cast<size_t>(t * o.hidden_size + c)];
      out = static_cast<float>(oracle_round(acc[static_cast<size_t>(c)], data.spec.out_dtype));
      result.status.nonfinite_outputs += std::isfinite(out) ? 0 : 1;
    }
  }
  return result;
}

}  // namespace nvfp4_moe::internal::test
