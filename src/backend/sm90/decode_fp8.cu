// Launches the layer of a few tokens in one launch with E4M3 activations (decode_fp8.cuh).
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/sm90/decode_fp8.cuh"

namespace nvfp4_moe::internal::sm90 {

Status decode_fp8(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const cuda::OneLaunchPlan& plan = step.plan->one_launch;
  const DecodeArgs args = decode_args(step);
  const auto launch_of = [&]<cuda::Gemm1Function kFunction>() {
    Fp8DecodeArgsOf<kFunction> own{};
    static_cast<DecodeArgs&>(own) = args;
    if constexpr (kFunction == cuda::Gemm1Function::kGeluOrSitu)
      own.gelu_or_situ = cuda::GeluOrSitu::from(config);
    own.hidden_rule = cuda::hidden_args(step, step.buffers.routed).rule;
    own.intermediate_rule = cuda::intermediate_args(step, step.buffers.routed).rule;
    const auto launch = [&]<int kColumns>() {
      return cuda::launch_as<sm90_decode_fp8_kernel<kFunction, kColumns>>(
          true, "decode_fp8", static_cast<unsigned>(plan.ctas), kDecodeThreads, plan.shared_bytes,
          step.stream, own);
    };
    static_assert(kFp8DecodeTokens == 4);
    if (args.tokens == 1) return launch.template operator()<1>();
    if (args.tokens == 2) return launch.template operator()<2>();
    return launch.template operator()<4>();
  };
  return cuda::with_gemm1_function(cuda::gemm1_function(config->activation), launch_of);
}

}  // namespace nvfp4_moe::internal::sm90
