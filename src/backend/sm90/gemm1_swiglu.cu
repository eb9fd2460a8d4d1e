// gemm1_swiglu: hidden (T, H), joined gate/up tiles -> part.intermediate.bf16 (R, I).
//
// g = alpha_gate * dot, u = alpha_up * dot in fp32, alpha = fl32(line scale * tensor scale); the activation function,
// the router weight under before_down, one rounding to bf16. Gate and up of one channel are rows r and r + 8 of a
// fragment, so that both sums are in one lane. Rows of a flagged token are NaN: their line scale is.
#include <limits>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/gather.h"
#include "backend/sm90/gemm_launch.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::sm90 {
namespace {

// Every gated activation without a branch: h = at_most(g' sigmoid(a g'), product_limit) (within(u, up_limit) +
// up_offset), g' = at_most(g, gate_limit). Limits that a function does not have are infinite. NaN stays NaN.
struct GatedActivation {
  float gate_limit, exponent, product_limit, up_limit, up_offset;  // e^(-a g') = 2^(exponent g')
  bool plain;                                                      // no limits

  static GatedActivation from(const MoeConfig& config) {
    constexpr float kNone = std::numeric_limits<float>::infinity();
    constexpr float kLog2E = 1.44269504f;
    const float limit = config->swiglu_limit.value_or(kNone);
    switch (config->activation) {
      case Activation::kSwiglu: break;
      case Activation::kSwigluClamped: return {limit, -kLog2E, kNone, limit, 0, false};
      case Activation::kSwigluStep: return {kNone, -kLog2E, limit, limit, 0, false};
      case Activation::kSwigluOai: return {limit, -kLog2E * config->swiglu_alpha, kNone, limit, 1, false};
    }
    return {kNone, -kLog2E, kNone, kNone, 0, true};
  }
  __device__ static float at_most(float x, float most) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
  }
  __device__ static float within(float x, float most) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(at_most(x, most)), "f"(-most));
    return y;
  }
  // Within an ulp; IEEE division is a call, around which ptxas serializes wgmma.
  __device__ static float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // Within two ulps. That x is rounded is a change of g by half an ulp, which g's own bound holds many times.
  __device__ static float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // kPlain: no limits; the same bits.
  template <bool kPlain>
  __device__ float gated(float g, float u) const {
    const float gate = kPlain ? g : at_most(g, gate_limit);
    const float product = gate * reciprocal(1.0f + power_of_two(exponent * gate));
    return kPlain ? product * (u + up_offset) : at_most(product, product_limit) * (within(u, up_limit) + up_offset);
  }
};

template <bool kFlags>
struct SwigluEpilogue {
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (T), or null: 1
  const uint8_t* nonfinite;           // (T)
  const float* router_weights;        // (T k) by choice, or null: 1
  GatedActivation activation;
  uint16_t* out;     // (R, I) bf16
  int64_t channels;  // I
  uint8_t* flags;    // (R) set where a row has NaN or Inf, or null

  static constexpr bool kJoined = true, kFlagsRows = kFlags;
  __device__ void flag_if(bool bad, int64_t row) const {
    if (bad && flags != nullptr) flags[row] = 1;
  }
  __device__ uint16_t* bf16_out() const { return out; }

  __device__ ExpertScales scales(int32_t expert) const {
    return {tensor_scales[expert].gate, tensor_scales[expert].up};
  }
  __device__ LineScale line_scale_of(int32_t line, int32_t choice) const {
    const float scale = row_scale != nullptr ? row_scale[line] : 1.0f;
    return {nonfinite[line] != 0 ? __uint_as_float(0x7FC00000u) : scale,
            router_weights != nullptr ? router_weights[choice] : 1.0f};
  }
  __device__ bool plain() const { return activation.plain; }
  template <bool kPlain>
  __device__ float value(float gate_sum, float up_sum, const LineFactor& factor) const {
    return activation.gated<kPlain>(gate_sum * kSumFactor * factor.first, up_sum * kSumFactor * factor.second) *
           factor.weight;
  }
  // weight_row: of gate; 8 further is up of the same channel.
  __device__ void store(int64_t row, int32_t weight_row, float gate_sum, float up_sum, const LineFactor& factor) const {
    const int64_t channel = cuda::joined_row(weight_row).row;
    if (channel >= channels) return;
    const uint16_t bits = cuda::bf16_from_float(value<false>(gate_sum, up_sum, factor));
    out[row * channels + channel] = bits;
    if constexpr (kFlags) flag_if((bits & 0x7F80u) == 0x7F80u, row);
  }
};

template <size_t kVariant, class Lines>
__global__ void __launch_bounds__(Shape<kVariant>::kThreads, 1)
    sm90_gemm1_kernel(const __grid_constant__ GemmArgs args,
                      const __grid_constant__ SwigluEpilogue<kVariants[kVariant].tensor_lines> epilogue,
                      const __grid_constant__ Lines lines) {
  gemm<Shape<kVariant>>(args, epilogue, lines);
}

// Whether each block routes for itself: in the walk, where the kernel before this one routes and lets this one start
// once all before it have ended.
bool routes_here(const StepContext& step, const PartPlan& plan) {
  return !plan.shared && cuda::routes_and_quantizes_at_once(step) &&
         step.batch.tokens * step.weights.config->top_k <= cuda::kFewChoices;
}

void run_gemm1(const StepContext& step, const PartBuffers& part, bool in_walk) {
  const MoeConfig& config = step.weights.config;
  if (step.batch.tokens == 0) return;
  const cuda::PackedLayout packed(config, step.weights.range);
  const PartPlan plan(step, part, packed);
  const Scratch scratch(step);
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  GemmArgs args = gemm_args(step, part, plan, plan.layout.gate_up, scratch);
  // Whether a kernel lies between route and this one, which has waited for route.
  args.routed = (kVariants[plan.variant].tensor_lines && !plan.shared) ||
                (in_walk && (plan.shared || !cuda::routes_and_quantizes_at_once(step)));
  args.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + plan.layout.offset;
  const uint16_t* const x = nvfp4 ? scratch.common.hidden_operand : step.buffers.hidden.bf16;
  args.assignment_of_row = part.assignment_of_row;
  const auto fill = [&](auto epilogue) {
    epilogue.tensor_scales = cuda::tensor_scales(step.weights, plan.shared);
    epilogue.row_scale = nvfp4 ? step.buffers.hidden.row_scale : nullptr;
    epilogue.nonfinite = step.buffers.hidden.nonfinite;
    epilogue.router_weights =
        config->router_weight == RouterWeight::kBeforeDown && !plan.shared ? step.batch.topk_weights : nullptr;
    epilogue.activation = GatedActivation::from(config);
    epilogue.out = part.intermediate.bf16;
    epilogue.channels = part.intermediate_size;
    if (!plan.shared && flags_rows(config, kVariants[plan.variant])) epilogue.flags = part.intermediate.nonfinite;
    return epilogue;
  };

  const auto blocks = static_cast<unsigned>(args.work.blocks);
  with_variant(plan.variant, [&](auto variant) {
    using S = Shape<variant.value>;
    const auto launch = [&](auto lines) {
      constexpr auto kKernel = sm90_gemm1_kernel<variant.value, decltype(lines)>;
      cuda::launch<kKernel>(blocks, S::kThreads, S::kBytes, step.stream, args,
                            fill(SwigluEpilogue<S::kIs.tensor_lines>{}), lines);
    };
    if constexpr (S::kIs.tensor_lines) {
      const int64_t lines = step.batch.tokens * (plan.shared ? 1 : config->top_k);  // at most
      const uint16_t* const rows = plan.shared                            ? x
                                   : in_walk && quantizes_into_rows(step) ? gathered(part)
                                                                          : gather_rows(step, part, x);
      launch(tensor_lines(rows, lines, config->hidden_size));
    } else {
      const auto k = static_cast<int32_t>(config->hidden_size);
      if constexpr (S::kMayRouteHere) {
        if (in_walk && routes_here(step, plan)) {
          const bool early = !nvfp4 && step.batch.hidden_dtype == DType::kBf16 &&
                             reinterpret_cast<uintptr_t>(step.batch.hidden) % 16 == 0;
          const auto* const own = early ? static_cast<const uint16_t*>(step.batch.hidden) : x;
          return launch(ChosenLines{own, k, early, cuda::choices_of(step)});
        }
      }
      launch(CopiedLines{x, k});
    }
  });
}

}  // namespace

void gemm1_swiglu(const StepContext& step, const PartBuffers& part) { run_gemm1(step, part, false); }
void gemm1_swiglu_in_walk(const StepContext& step, const PartBuffers& part) { run_gemm1(step, part, true); }

}  // namespace nvfp4_moe::sm90
