// gemm1_swiglu: hidden (T, H) and joined gate/up tiles (or up tiles, without a gate) ->
// part.intermediate.bf16 (R, I).
//
// g = alpha_gate * dot and u = alpha_up * dot in fp32, alpha = fl32(row scale * tensor scale), plus
// their biases if there are any. Then the activation function, the router weight under before_down,
// and one rounding to bf16. Gate and up of one channel are weight rows r and r + 8 of a fragment,
// so one lane has both accumulators. Rows of a nonfinite token are NaN, because their alpha is.
#include <cuda_runtime.h>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/gemm/biases.cuh"
#include "backend/cuda/gemm/gated_activation.cuh"
#include "backend/cuda/plain/architecture.h"
#include "backend/cuda/plain/config.h"
#include "backend/cuda/plain/gemm.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "core/activation.h"

namespace nvfp4_moe::internal::cuda::plain {
namespace {

struct Gemm1Args {
  GemmArgs gemm;
  const TensorScales* tensor_scales;  // (E)
  const Fp8Shifts* shifts;            // (E), if weights are rounded to E4M3
  const float* row_scale;             // (T), or null: 1
  const uint8_t* nonfinite;           // (T)
  const float* router_weights;        // (T k) by assignment, or null: 1
  BiasTable biases;
  Activation function;  // of swiglu, and its numbers
  float limit, alpha;
  uint16_t* out;  // (R, I) bf16
  int64_t intermediate;
  GeluOrSitu gelu_or_situ;
};

struct RowFactors {
  float gate, up, weight;
};

// e^x within two ulps: gemm1 agrees with the reference within a bound, and its bits need not match
// a host's.
struct FastExp {
  NVFP4_MOE_HOST_DEVICE float operator()(float x) const { return expf(x); }
};

// Weight rows r and r + 8 are gate and up of one channel; under relu2 two channels of up.
template <int kTileN, bool kE4m3, Gemm1Function kFunction>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm1_swiglu_kernel(Gemm1Args args) {
  constexpr bool kGated = kFunction != Gemm1Function::kRelu2;
  __shared__ RowFactors factors[kTileN];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: later kernels rely on route
  const CtaRows rows = rows_of_cta<kTileN>(args.gemm);
  if (rows.count <= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < rows.count; i += kGemmThreads) {
    const int64_t token = source_row(args.gemm, rows.first + i);
    const TensorScales& tensor = args.tensor_scales[rows.expert];
    const double row_scale = args.nonfinite[token] != 0  ? double{__uint_as_float(0x7FC00000u)}
                             : args.row_scale != nullptr ? double{args.row_scale[token]}
                                                         : 1.0;
    factors[i] = {static_cast<float>(row_scale * double{tensor.gate}),
                  static_cast<float>(row_scale * double{tensor.up}),
                  args.router_weights != nullptr
                      ? args.router_weights[args.gemm.assignment_of_row[rows.first + i]]
                      : 1.0f};
  }  // multiply's barriers make them visible before they are read

  const Fragment fragment;
  const int64_t channel =
      kGated ? int64_t{blockIdx.y} * (kTileRows / 2) + fragment.group * 8 + fragment.row
             : int64_t{blockIdx.y} * kTileRows + fragment.group * kGroupRows + fragment.row;
  args.biases.prefetch(static_cast<int32_t>(rows.expert), channel, args.intermediate);
  Accumulators<kTileN> accumulators;
  const Fp8Shifts shifts = kE4m3 ? args.shifts[rows.expert] : Fp8Shifts{};
  const WeightScales<kE4m3> weight_scales(kGated ? shifts.gate : shifts.up, shifts.up);
  multiply<kTileN>(args.gemm, rows, blockIdx.y, weight_scales, accumulators);

  if (channel >= args.intermediate) return;
  const nvfp4_moe::internal::GatedActivation activation{args.function, args.limit, args.alpha};
  const LaneBiases bias =
      args.biases.of(static_cast<int32_t>(rows.expert), channel, args.intermediate);
#pragma unroll
  for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = n * 8 + fragment.n + i;
      if (row >= rows.count) continue;
      const RowFactors& factor = factors[row];
      uint16_t* const out = args.out + (rows.first + row) * args.intermediate + channel;
      if constexpr (kGated) {
        const float g = fmaf(accumulators.at[n][i], factor.gate, bias.first);
        const float u = fmaf(accumulators.at[n][2 + i], factor.up, bias.second);
        const float h = kFunction == Gemm1Function::kGeluOrSitu
                            ? args.gelu_or_situ.gated<false>(g, u)
                            : activation.apply(g, u, FastExp());
        *out = bf16_from_float(h * factor.weight);
      } else {
        out[0] = bf16_from_float(relu2(fmaf(accumulators.at[n][i], factor.up, bias.first)) *
                                 factor.weight);
        out[8] = bf16_from_float(relu2(fmaf(accumulators.at[n][2 + i], factor.up, bias.second)) *
                                 factor.weight);
      }
    }
}

}  // namespace

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const int tile_n = plan_of(step, part).gemm1.tile_n;
  const PartTiles tiles(step, part, tile_n);
  const Scratch scratch(step);
  Gemm1Args args{};
  args.gemm = gemm_args(part, tiles, scratch);
  args.gemm.weights =
      reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + tiles.layout.offset;
  args.gemm.k_tiles = tiles.layout.gate_up.k_tiles;
  args.gemm.k = config->hidden_size;
  args.gemm.x = bf16_rows(hidden_rows(step, part));
  args.gemm.assignment_of_row = part.assignment_of_row;
  args.gemm.top_k = config->top_k;
  args.tensor_scales = tensor_scales(step.weights, tiles.shared);
  args.shifts = fp8_shifts(step.weights, tiles.shared);
  args.row_scale = part.hidden.row_scale;  // null under bf16
  args.nonfinite = part.hidden.nonfinite;
  args.router_weights = config->router_weight == RouterWeight::kBeforeDown && !tiles.shared
                            ? step.batch.topk_weights
                            : nullptr;
  args.biases = gemm1_biases(step.weights, tiles.shared);
  const auto activation = nvfp4_moe::internal::GatedActivation::of(config.options());
  args.function = activation.function, args.limit = activation.limit;
  args.alpha = activation.alpha;
  args.out = part.intermediate.bf16;
  args.intermediate = part.intermediate_size;
  args.gelu_or_situ = GeluOrSitu::from(config);
  const dim3 grid = tiles.grid(tiles.layout.gate_up.row_tiles);
  return with_config(step, tile_n, [&]<int kTileN, bool kE4m3>() {
    return with_gemm1_function(gemm1_function(config->activation), [&]<Gemm1Function kFunction>() {
      return cuda::launch<gemm1_swiglu_kernel<kTileN, kE4m3, kFunction>>(
          "gemm1_swiglu", grid, kGemmThreads, 0, step.stream, args);
    });
  });
}

}  // namespace nvfp4_moe::internal::cuda::plain
