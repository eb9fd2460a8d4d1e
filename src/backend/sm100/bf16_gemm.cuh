// The grouped GEMM for bf16 activations on tcgen05 kind::f16: packed weight rows, dequantized to
// bf16 in shared memory, times bf16 rows. bf16 holds e2m1 * e4m3 exactly. Weights are packed as for
// FP4 products.
//
// Roles are those of gemm.cuh, plus four warps that dequantize, one thread per weight row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/mma.cuh"
#include "backend/sm100/bf16_shared.cuh"
#include "backend/sm100/gemm.cuh"

namespace nvfp4_moe::internal::sm100 {

// Gathers bf16 rows: 16 bytes (8 k) per thread of a k-block of 128. k beyond the row's is 0.
template <class Traits>
class Bf16Rows : public TileSources<Traits> {
  using Base = TileSources<Traits>;
  using Base::args_, Base::rows_, Base::x_row_, Base::row, Base::vec;

 public:
  using Base::Base;
  __device__ void request(int32_t k_block, Bf16Stage<Traits>& stage) const {
    const int64_t byte = int64_t{k_block} * (cuda::kTileK * 2) + vec() * 16;
    const bool valid = byte < args_.x_stride;
    const uint32_t to = ptx::shared_address(stage.rows[vec() / 8]);
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass)
      ptx::cp_async_16_if(to + bf16_offset(row(pass), vec() % 8),
                          args_.x + x_row_[pass] * args_.x_stride + (valid ? byte : 0), valid,
                          row(pass) < rows_.count);
  }
};

// Two codes, the even k in the low nibble of each half, as bf16 times 2^-126: s e e m at bits 15,
// 8, 7, 6.
__device__ inline uint32_t code_pair(uint32_t codes) {
  return (codes & 0x00080008u) << 12 | (codes & 0x00070007u) << 6;
}
// An E4M3 scale as bf16, in both halves.
__device__ inline uint32_t scale_pair(uint32_t e4m3) {
  const uint32_t bits = e4m3 == 0 ? 0 : (cuda::scale_to_ue5m3(e4m3) << 4) + 0x3A80u;
  return bits | bits << 16;
}

// Dequantizes a packed row of weights, 128 k, into both halves. row: within the tile.
__device__ inline void dequantize_row(const uint8_t* tile, int row,
                                      uint8_t* const (&halves)[cuda::kHalves]) {
  constexpr uint32_t kTwoTo126 = 0x7E807E80u;
#pragma unroll
  for (int half = 0; half < cuda::kHalves; ++half) {
    const uint32_t scales =
        *reinterpret_cast<const uint32_t*>(tile + weight_scales_offset(row, half));
#pragma unroll
    for (int vec = 0; vec < 2; ++vec) {  // of 32 k
      const uint4 codes =
          *reinterpret_cast<const uint4*>(tile + weight_codes_offset(row, half * 2 + vec));
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {  // of 8 k
        const uint32_t scale = scale_pair(scales >> (vec * 2 + word / 2) * 8 & 0xFF);
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t byte = words[word] >> i * 8 & 0xFF;
          const uint32_t code = code_pair((byte & 15) | (byte & 0xF0) << 12);
          pairs[i] = cuda::multiply_bf16x2(cuda::multiply_bf16x2(code, kTwoTo126), scale);
        }
        *reinterpret_cast<uint4*>(halves[half] + bf16_offset(row, vec * 4 + word)) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

// The role of the dequantizing warps.
template <class Traits>
__device__ void dequantize(Bf16Shared<Traits>& shared) {
  const int row = static_cast<int>(threadIdx.x) - kFirstDequantizeWarp * 32;
  PipelineState<Bf16Shared<Traits>::kStages> state;
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  for (cuda::WorkTile work; work_tiles.next(work);)
#pragma unroll 1
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
      Bf16Stage<Traits>& stage = shared.stages[state.stage];
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[state.stage]), state.parity);
      dequantize_row(stage.weights[0], row, {stage.dequantized[0], stage.dequantized[1]});
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(ptx::shared_address(&shared.dequantized[state.stage]));
    }
}

// The role of the warp that multiplies, executed by one lane.
template <class Traits>
__device__ void multiply_bf16(Bf16Shared<Traits>& shared) {
  const uint32_t tensor_memory = shared.tensor_memory;
  PipelineState<Bf16Shared<Traits>::kStages> state;
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    // It follows work_empty, so the accumulators are free as well.
    ptx::mbarrier_wait(ptx::shared_address(&shared.rows_full[index % 2]), turn_parity(index));
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t kind = ptx::tcgen05_bf16_kind((shared.rows[index % 2].count + 15) / 16 * 16);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.work_empty[index % 2]));
    const uint32_t accumulators = tensor_memory + index % 2 * Traits::kAccumulatorColumns;
#pragma unroll 1
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.dequantized[state.stage]),
                         state.parity);  // it follows full
      ptx::fence_proxy_async_shared();   // rows were written through the generic proxy
      ptx::tcgen05_fence_after_thread_sync();
      const Bf16Stage<Traits>& stage = shared.stages[state.stage];
      constexpr uint32_t kCoreBytes = 8 * kHalfRowBytes;  // for the eight rows of a swizzle
#pragma unroll
      for (int step = 0; step < cuda::kHalves * kHalfSteps; ++step) {
        const int half = step / kHalfSteps, offset = step % kHalfSteps * kBf16StepBytes;
        ptx::tcgen05_mma_bf16(
            accumulators,
            ptx::tcgen05_descriptor(ptx::shared_address(stage.dequantized[half]) + offset,
                                    kCoreBytes, ptx::Swizzle::k128B),
            ptx::tcgen05_descriptor(ptx::shared_address(stage.rows[half]) + offset, kCoreBytes,
                                    ptx::Swizzle::k128B),
            kind, k_block > 0 || step > 0);
      }
      ptx::tcgen05_commit(ptx::shared_address(&shared.empty[state.stage]));
    }
    ptx::tcgen05_commit(ptx::shared_address(&shared.accumulators_full[index % 2]));
  }
}

// The kernel.
template <class Traits, class Epilogue>
__device__ void bf16_gemm(const GemmArgs& args, const Epilogue& epilogue) {
  auto& shared = bf16_shared<Traits>();
  const int warp = static_cast<int>(threadIdx.x / 32);
  begin<Traits>(shared, args);
  if (warp < kFirstDequantizeWarp)
    take_role<Traits, Bf16Rows<Traits>>(warp, shared, args, epilogue,
                                        [&] { multiply_bf16<Traits>(shared); });
  else
    dequantize<Traits>(shared);
  end<Traits>(shared);
}

}  // namespace nvfp4_moe::internal::sm100
