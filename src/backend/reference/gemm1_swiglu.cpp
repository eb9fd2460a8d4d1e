// gemm1_swiglu: hidden, gate (I, H), up (I, H) -> part.intermediate.bf16 (R, I). relu2 has no gate.
//
// g = fl32(alpha_gate * dot), u = fl32(alpha_up * dot): each is one rounding of the exact value
// (nvfp4, int8_block, fp8), or of the double sum times the tensor scale (bf16). Biases are added in
// fp32. The activation function, the router weight under before_down and the one rounding to bf16
// follow, all in double. Rows of a token that contains NaN or Inf are NaN. Clamps keep NaN.
#include <cmath>
#include <functional>

#include "backend/reference/dots.h"
#include "backend/reference/epilogue.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {
namespace {

double at_most(double x, double limit) { return x > limit ? limit : x; }  // NaN stays
double within(double x, double limit) { return x > limit ? limit : x < -limit ? -limit : x; }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x / (1 + std::exp(-x)); }

double activate(const MoeConfig& config, double g, double u) {
  const double limit = config->swiglu_limit.value_or(0);
  switch (config->activation) {
    case Activation::kSwiglu: return silu(g) * u;
    case Activation::kSwigluClamped: return silu(at_most(g, limit)) * within(u, limit);
    case Activation::kSwigluStep: return at_most(silu(g), limit) * within(u, limit);
    case Activation::kSwigluOai: {
      const double gate = at_most(g, limit);
      return gate * sigmoid(double{config->swiglu_alpha} * gate) * (within(u, limit) + 1);
    }
    case Activation::kRelu2:
      return u <= 0 ? 0 : u * u;  // NaN stays
    // erfc and sigmoid keep their relative accuracy in the tails, unlike 1 + erf and 1 + tanh.
    case Activation::kGelu: return g * (std::erfc(-g / std::sqrt(2.0)) / 2) * u;
    case Activation::kGeluTanh:
      return g * sigmoid(std::sqrt(8 / std::acos(-1.0)) * (g + 0.044715 * g * g * g)) * u;
    case Activation::kSitu: {
      const double b = *config->situ_gate_limit, l = *config->situ_up_limit;
      return b * std::tanh(g / b) * sigmoid(g) * (l * std::tanh(u / l));
    }
  }
  return std::nan("");
}

// Computes outputs [n0, n0 + kTileN) of every row of one expert.
template <class Accumulator>
void gate_up_tile(const StepContext& step, const PartBuffers& part, int64_t expert, int64_t n0) {
  const MoeConfig& config = step.weights.config;
  const ActivationBuffers& hidden = part.hidden;
  const ExpertMatrices weights = expert_matrices(step, part, expert);
  const ExpertBiases biases = expert_biases(step, part, expert);
  const bool gated = has_gate(config->activation);
  const bool before_down =
      config->router_weight == RouterWeight::kBeforeDown && part.assignment_of_row != nullptr;
  const int64_t end = part.row_offsets[expert + 1],
                n_end = std::min<int64_t>(n0 + kTileN, part.intermediate_size);

  constexpr int kRows = Tile<Accumulator>::kRows;
  for (int64_t row0 = part.row_offsets[expert]; row0 < end; row0 += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, end - row0));
    int64_t tokens[kRows];
    for (int m = 0; m < count; ++m) tokens[m] = token_of_row(part, row0 + m, config->top_k);
    Tile<Accumulator> gate, up;
    if (gated) dots(hidden, tokens, count, weights.gate, n0, gate);
    dots(hidden, tokens, count, weights.up, n0, up);
    for (int m = 0; m < count; ++m) {
      const double weight =
          before_down ? step.batch.topk_weights[part.assignment_of_row[row0 + m]] : 1.0;
      uint16_t* out = part.intermediate.bf16 + (row0 + m) * part.intermediate_size;
      for (int64_t n = n0; n < n_end; ++n) {
        const double g =
            gated ? add_bias(epilogue(hidden, tokens[m], gate.sum[m][n - n0], weights.gate, kFp32),
                             biases.gate, n)
                  : 0;
        const double u = add_bias(epilogue(hidden, tokens[m], up.sum[m][n - n0], weights.up, kFp32),
                                  biases.up, n);
        const bool bad = hidden.nonfinite[tokens[m]] != 0;
        out[n] = round_to_bf16(bad ? std::nan("") : activate(config, g, u) * weight);
      }
    }
  }
}

}  // namespace

void gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  const int64_t tiles = (part.intermediate_size + kTileN - 1) / kTileN;
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t expert = item / tiles, n0 = item % tiles * kTileN;
      with_accumulator(step.weights.config->activation_format, [&]<class Accumulator>() {
        gate_up_tile<Accumulator>(step, part, expert, n0);
      });
    }
  };
  step.executor.parallel_for(part.experts * tiles, 1, std::ref(body));
}

}  // namespace nvfp4_moe::internal::reference
