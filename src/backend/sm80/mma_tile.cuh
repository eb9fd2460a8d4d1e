// A tile of a grouped GEMM in mma.sync m16n8k16, for any tensor core from sm_80 up.
#pragma once

#include "backend/sm80/gemm_tile.cuh"

namespace nvfp4_moe::cuda {

template <int kTileLines>
struct MmaTile {
  static constexpr int kRows = kTileLines;
  static constexpr int kStages = 4;

  static __device__ void multiply(const GemmArgs& args, const BlockRows& rows, int64_t row_tile, Sums<kRows>& sums) {
    __shared__ alignas(128) uint16_t stages[kStages][kRows * kStageK];
    __shared__ int64_t lines[kRows];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    for (int i = thread; i < kRows; i += kGemmThreads)
      lines[i] = line_of_row(args, rows.first + min(i, rows.count - 1));
    __syncthreads();

    const int64_t steps = (args.k + kStageK - 1) / kStageK;
    const uint8_t* const tiles = row_tile_weights(args, rows, row_tile);
    const auto address = [&](int stage) { return static_cast<uint32_t>(__cvta_generic_to_shared(stages[stage])); };
    StepWeights weights[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) weights[stage] = load_weights(tiles, stage, steps);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy_lines<kRows>(args, rows.count, lines, stage, address(stage));
#pragma unroll
    for (auto& line_sums : sums.at)
      for (float& sum : line_sums) sum = 0;

    for (int64_t first = 0; first < steps; first += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int64_t step = first + stage;
        if (step >= steps) break;
        wait_copies<kStages - 2>();
        __syncthreads();  // the stage is there for all, and all are done with the one that is filled next
        copy_lines<kRows>(args, rows.count, lines, step + kStages - 1, address((stage + kStages - 1) % kStages));
        const StepWeights now = weights[stage];
        weights[stage] = load_weights(tiles, step + kStages, steps);
        const uint32_t words[4] = {now.codes.x, now.codes.y, now.codes.z, now.codes.w};
        const uint32_t scale_words[2] = {now.scales.x, now.scales.y};
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {  // two k16 steps: one word of scales, one load of four matrices
          uint32_t a[2][4];
          widen(words[2 * pair], scale_words[pair], false, a[0]);
          widen(words[2 * pair + 1], scale_words[pair], true, a[1]);
#pragma unroll
          for (int n = 0; n < kRows / 8; ++n) {
            const int line = n * 8 + lane % 8, piece = pair * 4 + lane / 8;
            uint32_t b[4];
            load_matrices(b, address(stage) + static_cast<uint32_t>(line * kStageK * 2 + (piece ^ line % 8) * 16));
            mma_bf16(sums.at[n], a[0], b[0], b[1]);
            mma_bf16(sums.at[n], a[1], b[2], b[3]);
          }
        }
      }
    }
    wait_copies<0>();
  }
};

}  // namespace nvfp4_moe::cuda
