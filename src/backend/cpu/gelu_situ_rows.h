// gelu, gelu_tanh and situ (core/gelu_situ.h) on 16 lanes, with the bits of those functions: the
// same operations of double in the same order.
//
// Included like rows.h, before it. The vectors are extensions of the compiler. Branches become
// selections.

using Doubles = double __attribute__((vector_size(8 * kDoubleLanes)));
using Words = int64_t __attribute__((vector_size(8 * kDoubleLanes)));
using Floats = float __attribute__((vector_size(4 * kDoubleLanes)));

// core/exp.h has the scalar one. The low bits of `shifted` are the integer n, so 2^n needs no
// conversion.
inline Doubles exp_unrounded(Doubles x) {
  constexpr double kShift = 0x1.8p52, kLog2e = 0x1.71547652b82fep0;
  constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  const Doubles shifted = x * kLog2e + kShift;
  const Doubles n = shifted - kShift;
  const Doubles r = (x - n * kLn2High) - n * kLn2Low;
  Doubles sum = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  Words bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const Words power_bits = (bits << 52) + (int64_t{1023} << 52);
  Doubles power;
  std::memcpy(&power, &power_bits, sizeof power);
  return sum * power;
}

inline Doubles sigmoid(Doubles x) {
  const Doubles zero = {}, most = zero + 708.0;
  const Doubles negated = x > most ? -most : -x;
  const Doubles result = 1.0 / (1.0 + exp_unrounded(x < -most ? most : negated));
  return x < -most ? zero : result;
}

inline Doubles tanh(Doubles x) {
  const Doubles zero = {}, most = zero + 354.0;
  const Doubles magnitude = x < zero ? -x : x;
  const Doubles square = x * x;
  Doubles sum = square * (-1382.0 / 155925.0) + 62.0 / 2835.0;
  sum = sum * square - 17.0 / 315.0;
  sum = sum * square + 2.0 / 15.0;
  sum = sum * square - 1.0 / 3.0;
  const Doubles small = x + x * (square * sum);
  const Doubles power = exp_unrounded(magnitude > most ? zero - 708.0 : -2.0 * magnitude);
  const Doubles ratio = (1.0 - power) / (1.0 + power);
  const Doubles large = x < zero ? -ratio : ratio;
  return magnitude < zero + 0.125 ? small : large;
}

inline Doubles normal_tail(Doubles magnitude) {
  const Doubles zero = {}, most = zero + 37.6;
  const Doubles a = magnitude > most ? most : magnitude;
  const Doubles t = (a - 5.0) / (a + 5.0);
  Doubles sum = zero + gelu_situ_detail::normal_tail_coefficient(0);
  for (int i = 1; i < gelu_situ_detail::kNormalTailTerms; ++i)
    sum = sum * t + gelu_situ_detail::normal_tail_coefficient(i);
  const Doubles tail = exp_unrounded(-0.5 * (a * a)) * sum / (1.0 + 0.75 * a);
  return magnitude > most ? zero : tail;
}

inline Doubles gelu(Doubles g, Doubles u) {
  const Doubles zero = {};
  const Doubles tail = normal_tail(g < zero ? -g : g);
  return g * (g < zero ? tail : 1.0 - tail) * u;
}
inline Doubles gelu_tanh(Doubles g, Doubles u) {
  constexpr double kTwiceC = 0x1.9884533d43651p+0;
  return g * sigmoid(kTwiceC * (g + 0.044715 * (g * g * g))) * u;
}
inline Doubles situ(Doubles g, Doubles u, double b, double l) {
  return b * tanh(g / b) * sigmoid(g) * (l * tanh(u / l));
}

inline F gelu_or_situ(const MoeOptions& options, F gate, F up) {
  float gates[16], ups[16];
  store(gates, gate);
  store(ups, up);
  const double b = options.situ_gate_limit.value_or(0.0f), l = options.situ_up_limit.value_or(0.0f);
  for (int i = 0; i < 16; i += kDoubleLanes) {
    Floats some_gates, some_ups;
    std::memcpy(&some_gates, gates + i, sizeof some_gates);
    std::memcpy(&some_ups, ups + i, sizeof some_ups);
    const Doubles g = __builtin_convertvector(some_gates, Doubles),
                  u = __builtin_convertvector(some_ups, Doubles);
    Doubles h;
    switch (options.activation) {
      case Activation::kGelu: h = gelu(g, u); break;
      case Activation::kGeluTanh: h = gelu_tanh(g, u); break;
      default: h = situ(g, u, b, l); break;
    }
    const Floats rounded = __builtin_convertvector(h, Floats);
    std::memcpy(gates + i, &rounded, sizeof rounded);
  }
  return load(gates);
}
