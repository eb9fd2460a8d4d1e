// The layer of a few tokens in one launch (decode.cuh): when a run uses it, and how it starts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/run_plan.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::sm90 {

inline constexpr int kDecodeTokens = 8;         // at most: columns of one mma
inline constexpr int kDecodeAssignments = 128;  // at most, without the shared expert's
// Every assignment may have its own expert; then the shared expert.
inline constexpr int kDecodeActive = kDecodeAssignments + 1;
inline constexpr int kDecodeExperts = 1024;  // a rank's, at most
inline constexpr int kDecodeWarps = 16, kDecodeWarpsShift = 4, kDecodeThreads = kDecodeWarps * 32;
static_assert(kDecodeWarps == 1 << kDecodeWarpsShift);
// 16 weight rows x 128 k: 1 KiB of codes, 128 bytes of scales.
inline constexpr int kDecodeSubtileBytes = 1024 + 128;
inline constexpr int kDecodeDepth = 4;  // subtiles of a warp's ring
inline constexpr int kDecodeRingBytes = kDecodeWarps * kDecodeDepth * kDecodeSubtileBytes;
// Partial accumulators: a slot for each warp, 16 weight rows x 8 columns, fp32.
inline constexpr int kDecodePartialBytes = kDecodeWarps * 16 * 8 * 4;

// Bytes of a row of activations in shared memory. Rows are shifted by half the banks, so that the
// reads of two tokens do not collide.
NVFP4_MOE_HOST_DEVICE constexpr int32_t decode_row_bytes(int32_t k_tiles) {
  return k_tiles * cuda::kTileK * 2 + 64;
}

// The same under fp8. At eight a launch per step was faster (bench/notes/hopper.md).
inline constexpr int kFp8DecodeTokens = 4;
// Warps that share a row of down at least, under fp8: a warpgroup multiplies one expert's rows.
inline constexpr int kFp8DownWarps = 4;
// Partial accumulators of gate/up under fp8 (decode_fp8.cuh).
inline constexpr int kFp8GateUpPartialBytes = 2 * kDecodeWarps * 16 * 8 * 4;
// The table of E4M3 magnitudes of weights: 160 scale indices, 16 copies (decode_fp8.cuh).
inline constexpr int kFp8TableBytes = 160 * 16 * 8;
// A product in E4M3 reads up to three tiles and a core matrix beyond the last row.
inline constexpr int kFp8TailBytes = 3 * kDecodeTokens * cuda::kTileK + 128;

// The plan of a run in one launch; without ctas if the run needs a launch per step.
cuda::OneLaunchPlan plan_decode(const MoeConfig& config, const ExpertRange& range,
                                const DeviceFacts& device, const cuda::RunFacts& facts);
Status decode(const StepContext& step);
Status decode_fp8(const StepContext& step);  // with E4M3 activations

}  // namespace nvfp4_moe::internal::sm90
