// gemm2: part.intermediate (R, I), down tiles -> part.rows_out (R, H) in row_format.
//
// row = alpha_down * dot in fp32, alpha = fl32(line scale * tensor scale), then row_format. A flagged row is NaN: its
// line scale is. Under bf16 the intermediate itself is the operand, NaN and Inf included.
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/gemm_launch.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::sm90 {
namespace {

struct RowEpilogue {
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (R), or null: 1
  void* out;                          // (R, H) bf16, or fp32
  bool out_fp32;
  int64_t channels;  // H

  static constexpr bool kJoined = false, kFlagsRows = false;
  __device__ uint16_t* bf16_out() const { return out_fp32 ? nullptr : static_cast<uint16_t*>(out); }

  __device__ ExpertScales scales(int32_t expert) const { return {tensor_scales[expert].down, 0}; }
  __device__ LineScale line_scale_of(int32_t line, int32_t) const {
    return {row_scale != nullptr ? row_scale[line] : 1.0f, 1.0f};
  }
  __device__ bool plain() const { return true; }
  __device__ float value(float sum, const LineFactor& factor) const { return sum * kSumFactor * factor.first; }
  __device__ void store(int64_t row, int32_t channel, float sum, float sum_8_further, const LineFactor& factor) const {
    const int64_t at = row * channels + channel;
    if (channel < channels) store_one(at, value(sum, factor));
    if (channel + 8 < channels) store_one(at + 8, value(sum_8_further, factor));
  }
  __device__ void store_one(int64_t at, float value) const {
    if (out_fp32)
      static_cast<float*>(out)[at] = value;
    else
      static_cast<uint16_t*>(out)[at] = cuda::bf16_from_float(value);
  }
};

template <size_t kVariant, class Lines>
__global__ void __launch_bounds__(Shape<kVariant>::kThreads, 1)
    sm90_gemm2_kernel(const __grid_constant__ GemmArgs args, const __grid_constant__ RowEpilogue epilogue,
                      const __grid_constant__ Lines lines) {
  gemm<Shape<kVariant>>(args, epilogue, lines);
}

}  // namespace

void gemm2(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  if (step.batch.tokens == 0) return;
  const cuda::PackedLayout packed(config, step.weights.range);
  const PartPlan plan(step, part, packed);
  const Scratch scratch(step);
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  GemmArgs args = gemm_args(step, part, plan, plan.layout.down, scratch);
  args.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + plan.layout.offset +
                 (part.down_only ? 0 : plan.layout.gate_up.bytes());
  args.waits_long = nvfp4;
  args.routed = !part.down_only;  // a linear has no route, and what stands for it comes just before this kernel
  const uint16_t* const x = !nvfp4        ? part.intermediate.bf16
                            : plan.shared ? scratch.common.shared_operand
                                          : scratch.common.routed_operand;
  const int64_t rows = step.batch.tokens * (plan.shared ? 1 : config->top_k);  // at most
  RowEpilogue epilogue{};
  epilogue.tensor_scales = cuda::tensor_scales(step.weights, plan.shared);
  epilogue.row_scale = part.intermediate.row_scale;  // null under bf16, but for a linear
  epilogue.out = part.rows_out;
  epilogue.out_fp32 = config->row_format == RowFormat::kFp32;
  epilogue.channels = config->hidden_size;

  const auto blocks = static_cast<unsigned>(args.work.blocks);
  with_variant(plan.variant, [&](auto variant) {
    using S = Shape<variant.value>;
    const auto launch = [&](auto lines) {
      constexpr auto kKernel = sm90_gemm2_kernel<variant.value, decltype(lines)>;
      cuda::launch<kKernel>(blocks, S::kThreads, S::kBytes, step.stream, args, epilogue, lines);
    };
    if constexpr (S::kIs.tensor_lines)
      launch(tensor_lines(x, rows, part.intermediate_size));
    else
      launch(CopiedLines{x, static_cast<int32_t>(part.intermediate_size)});
  });
}

}  // namespace nvfp4_moe::sm90
