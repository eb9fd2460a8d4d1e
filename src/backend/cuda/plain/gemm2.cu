// gemm2: part.intermediate (R, I), down tiles -> part.rows_out (R, H) in row_format.
//
// row = alpha_down * dot in fp32, alpha = fl32(row scale * tensor scale), plus the bias if there is
// one, then converted to row_format. A nonfinite row is NaN, because its alpha is. Under bf16 the
// intermediate itself is the operand, including NaN and Inf.
#include <cuda_runtime.h>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/gemm/biases.cuh"
#include "backend/cuda/plain/architecture.h"
#include "backend/cuda/plain/config.h"
#include "backend/cuda/plain/gemm.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/formats.cuh"

namespace nvfp4_moe::internal::cuda::plain {
namespace {

struct Gemm2Args {
  GemmArgs gemm;
  const TensorScales* tensor_scales;  // (E)
  const Fp8Shifts* shifts;            // (E), if weights are rounded to E4M3
  const float* row_scale;             // (R), or null: 1
  BiasTable biases;
  void* out;  // (R, H) kRow
  int64_t hidden;
};

template <int kTileN, bool kE4m3, DType kRow>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm2_kernel(Gemm2Args args) {
  __shared__ float alphas[kTileN];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: later kernels rely on route
  const CtaRows rows = rows_of_cta<kTileN>(args.gemm);
  if (rows.count <= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < rows.count; i += kGemmThreads) {
    const double row_scale =
        args.row_scale != nullptr ? double{args.row_scale[rows.first + i]} : 1.0;
    alphas[i] = static_cast<float>(row_scale * double{args.tensor_scales[rows.expert].down});
  }  // multiply's barriers make them visible before they are read

  const Fragment fragment;
  const int64_t channel =
      int64_t{blockIdx.y} * kTileRows + fragment.group * kGroupRows + fragment.row;
  args.biases.prefetch(static_cast<int32_t>(rows.expert), channel, args.hidden);
  Accumulators<kTileN> accumulators;
  const int32_t shift = kE4m3 ? args.shifts[rows.expert].down : 0;
  const WeightScales<kE4m3> weight_scales(shift, shift);
  multiply<kTileN>(args.gemm, rows, blockIdx.y, weight_scales, accumulators);

  const LaneBiases bias = args.biases.of(static_cast<int32_t>(rows.expert), channel, args.hidden);
#pragma unroll
  for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = n * 8 + fragment.n + i % 2;
      const int64_t at = channel + i / 2 * 8;
      if (row < rows.count && at < args.hidden)
        store_element<kRow>(
            args.out, (rows.first + row) * args.hidden + at,
            fmaf(accumulators.at[n][i], alphas[row], i < 2 ? bias.first : bias.second));
    }
}

}  // namespace

Status gemm2(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const int tile_n = plan_of(step, part).gemm2.tile_n;
  const PartTiles tiles(step, part, tile_n);
  const Scratch scratch(step);
  Gemm2Args args{};
  args.gemm = gemm_args(part, tiles, scratch);
  args.gemm.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) +
                      tiles.layout.offset + (part.down_only ? 0 : tiles.layout.gate_up.bytes());
  args.gemm.k_tiles = tiles.layout.down.k_tiles;
  args.gemm.k = part.intermediate_size;
  args.gemm.x = bf16_rows(intermediate_rows(step, part));
  args.tensor_scales = tensor_scales(step.weights, tiles.shared);
  args.shifts = fp8_shifts(step.weights, tiles.shared);
  args.row_scale = part.intermediate.row_scale;  // null under bf16, except in a linear
  args.biases = down_biases(step.weights, tiles.shared);
  args.out = part.rows_out;
  args.hidden = config->hidden_size;
  const dim3 grid = tiles.grid(tiles.layout.down.row_tiles);
  return with_config(step, tile_n, [&]<int kTileN, bool kE4m3>() {
    if (config->row_format == RowFormat::kBf16)
      return launch<gemm2_kernel<kTileN, kE4m3, DType::kBf16>>("gemm2", grid, kGemmThreads, 0,
                                                               step.stream, args);
    return launch<gemm2_kernel<kTileN, kE4m3, DType::kF32>>("gemm2", grid, kGemmThreads, 0,
                                                            step.stream, args);
  });
}

}  // namespace nvfp4_moe::internal::cuda::plain
