// A GEMM's sides, the shape of its tiles, and where things lie in a block's shared memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/few_choices.cuh"
#include "backend/sm90/barrier.cuh"
#include "backend/sm90/variant.h"
#include "backend/sm90/work.h"

namespace nvfp4_moe::sm90 {

// A grouped GEMM's sides.
struct GemmArgs {
  const uint8_t* weights;  // packed tiles of expert 0
  int64_t expert_stride;   // bytes
  int32_t row_tiles, k_tiles;
  WorkShape work;
  Divider by_top_k;
  const int32_t* assignment_of_row;  // (R): line = choice / top_k; null: line = row
  const int64_t* row_offsets;        // (2) of dense rows
  const cuda::RowTile* tiles;        // null: one expert, dense rows
  const int32_t* tile_count;
  float* partials;    // (2 blocks) x partial_bytes of the variant
  int32_t* arrivals;  // (blocks) of the pieces of a unit that is cut; 0 before and after
  bool waits_long;    // for requantize as well as gemm1
  bool routed;        // whether route has ended before this kernel begins, and not just before it waits
};

// Lines of activations (lines, k) bf16 as a narrow variant copies them: k is a multiple of 16, and the weights' padding
// beyond it is 0.
struct CopiedLines {
  const uint16_t* x;
  int32_t k;
  static constexpr bool kRoutesHere = false;
};
// The same of few choices, which each block routes for itself while route does: it knows its weights, and may request
// them, before route has ended.
struct ChosenLines {
  const uint16_t* x;
  int32_t k;
  bool early;  // x is the batch's own: there before this kernel starts, and not just once route has ended
  cuda::ChoiceIds choices;
  static constexpr bool kRoutesHere = true;
};
// Lines that lie in the order of the rows, as a variant with tensor_lines copies them: in boxes of kBoxLines x kBoxK.
struct TensorLines {
  CUtensorMap map;
  static constexpr bool kRoutesHere = false;
};
inline constexpr int kBoxLines = 32, kBoxK = 64, kBoxBytes = kBoxLines * kBoxK * 2;

// Both GEMMs' tensor scales of one expert: gate's and up's, or down's.
struct ExpertScales {
  float first, second;
};
// What a line brings into its sums.
struct LineScale {
  float scale;   // the line's own, NaN where it is flagged
  float weight;  // the router's, or 1
};
// What the sums of one line and one expert are multiplied by: alpha = fl32(line scale * tensor scale) of each tensor
// scale. (kSumFactor is not in it: a large alpha might overflow.)
struct alignas(16) LineFactor {
  float first, second, weight;

  LineFactor() = default;
  __device__ LineFactor(const LineScale& line, const ExpertScales& scales)
      : first(line.scale * scales.first), second(line.scale * scales.second), weight(line.weight) {}
};

// The rows of one tile.
struct TileRows {
  int64_t first;
  int32_t expert, count;
};
// What a block that routes few choices for itself keeps of them.
struct FewRows {
  cuda::RowTile tiles[cuda::kFewChoices];
  int32_t assignment_of_row[cuda::kFewChoices];
};
// A piece as the math warpgroups see it, made by those that load.
struct PieceInfo {
  TileRows rows;
  int32_t weight_row;  // the first
  int32_t chunks, partial;
};

template <size_t kVariant>
struct Shape {
  static constexpr Variant kIs = kVariants[kVariant];
  static constexpr int kLines = kIs.lines;
  static constexpr int kRowBlocks = kIs.row_blocks;
  static constexpr int kMathGroups = 4, kMathThreads = kMathGroups * 128;  // warpgroups that multiply; one more loads
  static constexpr int kThreads = kMathThreads + 128;
  static constexpr int kM64 = kRowBlocks * 2 / kMathGroups;  // of one math warpgroup
  static_assert(kM64 * kMathGroups == kRowBlocks * 2);
  // Of a thread: together what a block begins with, 65536 in equal shares of eights.
  static constexpr int kMathRegisters = 104, kLoadRegisters = 64;
  static constexpr int kGroupSteps = kIs.group_steps;
  static constexpr int64_t kPartialQuads = kIs.partial_bytes() / 16;
  static constexpr int kHalfLineBytes = kLines * 128;  // 64 k of all lines
  static constexpr int kLineBytes = 2 * kHalfLineBytes;
  static constexpr int kStageBytes = kLineBytes + kRowBlocks * static_cast<int>(cuda::kTileBytes);
  static_assert(kStageBytes % 1024 == 0);  // the swizzle's period

  static constexpr int kWorkBytes = 128;
  static_assert(sizeof(Work) + 2 * sizeof(UnitPieces) <= kWorkBytes);
  // Where latency counts, a piece is multiplied before its line factors are there.
  static constexpr bool kFactorsLater = kLines <= 16;
  static constexpr bool kMayRouteHere = kLines == 8;
  static constexpr int kFewBytes = kMayRouteHere ? (static_cast<int>(sizeof(FewRows)) + 15) / 16 * 16 : 0;
  // After the stages: slabs, factors and line indices of two pieces, what they are, the work and who is last, few
  // choices' rows, barriers.
  static constexpr int kSlabBytes = 16 * 1024 / kMathGroups;  // where a math warpgroup transposes what it stores
  static constexpr int kSlabsBytes = kIs.tensor_lines ? kMathGroups * kSlabBytes : 0;
  static constexpr int kUnitBytes = kSlabsBytes + 2 * kLines * static_cast<int>(sizeof(int32_t) + sizeof(LineFactor)) +
                                    2 * static_cast<int>(sizeof(PieceInfo)) + kWorkBytes + kFewBytes;
  static constexpr int kBarrierBytes = 64;  // besides the stages'
  static constexpr int kMostStages = (kSharedBytes - kUnitBytes - kBarrierBytes) / (kStageBytes + 16);
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
  static_assert(kStages >= 3);
  static constexpr int kBytes = kStages * (kStageBytes + 16) + kUnitBytes + kBarrierBytes;
};

extern __shared__ __align__(1024) uint8_t shared_bytes[];

// Where things lie in shared memory: constants, so that no thread holds an address.
template <class S>
struct SharedPlaces {
  static constexpr int kSlabs = S::kStages * S::kStageBytes;
  static constexpr int kFactors = kSlabs + S::kSlabsBytes;
  static constexpr int kLines = kFactors + 2 * S::kLines * static_cast<int>(sizeof(LineFactor));
  static constexpr int kPieces = kLines + 2 * S::kLines * static_cast<int>(sizeof(int32_t));
  static constexpr int kWork = kPieces + 2 * static_cast<int>(sizeof(PieceInfo));
  static constexpr int kFew = kWork + S::kWorkBytes;
  static constexpr int kFull = kFew + S::kFewBytes, kEmpty = kFull + S::kStages * 8,
                       kPieceFull = kEmpty + S::kStages * 8, kPieceFree = kPieceFull + 16,
                       kFactorsFull = kPieceFree + 16, kBegun = kFactorsFull + 16;

  __device__ static uint8_t* stage(int index) { return shared_bytes + index * S::kStageBytes; }
  __device__ static uint8_t* slab(int math_group) { return shared_bytes + kSlabs + math_group * S::kSlabBytes; }
  // (kLines) of a piece; two pieces' are kept.
  __device__ static LineFactor* factors(uint32_t unit) {
    return reinterpret_cast<LineFactor*>(shared_bytes + kFactors) + unit % 2 * S::kLines;
  }
  __device__ static int32_t* lines(uint32_t unit) {
    return reinterpret_cast<int32_t*>(shared_bytes + kLines) + unit % 2 * S::kLines;
  }
  __device__ static PieceInfo& piece(uint32_t index) {
    return reinterpret_cast<PieceInfo*>(shared_bytes + kPieces)[index % 2];
  }
  __device__ static Work& work() { return *reinterpret_cast<Work*>(shared_bytes + kWork); }
  __device__ static FewRows& few() { return *reinterpret_cast<FewRows*>(shared_bytes + kFew); }
  // (2) The units that the block has to finish, from its last one on; count 0: it was not the last to arrive.
  __device__ static UnitPieces* to_finish() {
    return reinterpret_cast<UnitPieces*>(shared_bytes + kWork + sizeof(Work));
  }
  __device__ static uint32_t full(int stage) { return shared_address(shared_bytes) + kFull + stage * 8; }
  __device__ static uint32_t empty(int stage) { return shared_address(shared_bytes) + kEmpty + stage * 8; }
  __device__ static uint32_t piece_full(uint32_t index) {
    return shared_address(shared_bytes) + kPieceFull + index % 2 * 8;
  }
  __device__ static uint32_t factors_full(uint32_t index) {
    return shared_address(shared_bytes) + kFactorsFull + index % 2 * 8;
  }
  __device__ static uint32_t begun() { return shared_address(shared_bytes) + kBegun; }
  __device__ static uint32_t piece_free(uint32_t index) {
    return shared_address(shared_bytes) + kPieceFree + index % 2 * 8;
  }
};

// The place in a ring, and the parity of the round.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ RingPlace next() const {
    return stage + 1 == kStages ? RingPlace{0, parity ^ 1} : RingPlace{stage + 1, parity};
  }
};

// kHere: of what the block has routed for itself.
template <class S, bool kHere>
__device__ TileRows rows_of_tile(const GemmArgs& args, int32_t tile) {
  if constexpr (kHere) {
    const cuda::RowTile& found = SharedPlaces<S>::few().tiles[tile];
    return {found.first_row, found.expert, found.rows};
  }
  if (args.tiles == nullptr) {
    const int64_t first = int64_t{tile} * S::kLines;
    return {first, 0, static_cast<int32_t>(min(int64_t{S::kLines}, __ldcg(args.row_offsets + 1) - first))};
  }
  const int32_t* const found = reinterpret_cast<const int32_t*>(args.tiles + tile);  // not from L1, which may be older
  return {__ldcg(found + 1), __ldcg(found), __ldcg(found + 2)};
}
template <class S>
__device__ int32_t tiles_of(const GemmArgs& args) {
  return args.tiles != nullptr ? __ldcg(args.tile_count)
                               : static_cast<int32_t>((__ldcg(args.row_offsets + 1) + S::kLines - 1) / S::kLines);
}

}  // namespace nvfp4_moe::sm90
