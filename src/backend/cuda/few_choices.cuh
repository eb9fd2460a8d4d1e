// The choices of a batch, and how a few threads route up to 128 of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/scratch.h"

namespace nvfp4_moe::cuda {

struct ChoiceIds {
  const void* ids;  // (choices) int32 or int64, global
  bool wide_ids;
  int64_t choices;
  int64_t num_experts;   // global
  int64_t first, count;  // the local range
};

inline ChoiceIds choices_of(const HostCall& call) {
  const MoeConfig& config = call.weights.config;
  return {call.batch.topk_ids,
          call.batch.ids_dtype == DType::kI64,
          call.batch.tokens * config->top_k,
          config->num_experts,
          call.weights.range.first,
          call.weights.range.count};
}

// From L2: a kernel may read them that began before the one that wrote them was known to have ended (sm90's gemm1).
__device__ inline int64_t global_id(const ChoiceIds& args, int64_t choice) {
  return args.wide_ids ? __ldcg(static_cast<const long long*>(args.ids) + choice)
                       : __ldcg(static_cast<const int32_t*>(args.ids) + choice);
}

// The local expert of an id, or -1: none, another rank's, or no expert at all, which bad counts.
__device__ inline int local_expert(const ChoiceIds& args, int64_t id, uint32_t& bad) {
  const bool no_expert = id < -1 || id >= args.num_experts;
  bad += no_expert;
  return !no_expert && id >= args.first && id < args.first + args.count ? static_cast<int>(id - args.first) : -1;
}
// The same of a choice below end; none beyond.
__device__ inline int local_expert(const ChoiceIds& args, int64_t choice, int64_t end, uint32_t& bad) {
  return choice < end ? local_expert(args, global_id(args, choice), bad) : -1;
}

// The tiles of one expert's rows, step each, from first_tile on.
__device__ inline void list_tiles(RowTile* to, int32_t expert, int32_t first_row, int32_t rows, int32_t step,
                                  int32_t first_tile, int32_t tiles) {
#pragma unroll 1
  for (int32_t t = 0; t < tiles; ++t)
    to[first_tile + t] = {expert, first_row + t * step, min(step, rows - t * step)};
}

inline constexpr int kFewChoices = 128;

// Up to kFewChoices choices, a thread each, which looks at all the others: what routing makes of its own.
struct FewChoices {
  struct alignas(16) Shared {
    int32_t experts[kFewChoices];  // of each choice, or -1
    int32_t tiles[kFewChoices];    // of a choice's expert where it is the first of it, else 0
  };
  int32_t expert = -1;
  uint32_t bad = 0;      // 1: the id is no expert's
  int32_t row = -1;      // choices of one expert are in their own order
  int32_t all_rows = 0, all_tiles = 0;

  // kFewChoices threads or more, thread 0 the first; sync: all of them. Lists the tiles of the thread's expert if the
  // choice is the first of it.
  template <class Sync>
  __device__ FewChoices(const ChoiceIds& args, Shared& shared, int32_t thread, int rows_of_tile, bool even_tiles,
                        RowTile* to, const Sync& sync) {
    if (thread < kFewChoices) {
      expert = local_expert(args, thread, args.choices, bad);
      shared.experts[thread] = expert;
    }
    sync();
    int32_t rows = 0, earlier = 0, rows_before = 0;  // of the same expert, of smaller ones
    each(args, shared.experts, [&](int32_t i, int32_t other) {
      rows += other == expert;
      earlier += other == expert && i < thread;
      rows_before += is_before(other);
      all_rows += other >= 0;
    });
    if (expert >= 0) row = rows_before + earlier;
    const int32_t tiles =
        expert < 0 || earlier != 0 ? 0 : rows <= rows_of_tile ? 1 : (rows + rows_of_tile - 1) / rows_of_tile;
    if (thread < kFewChoices) shared.tiles[thread] = tiles;
    sync();
    int32_t tiles_before = 0;
    each(args, shared.tiles, [&](int32_t i, int32_t others) {
      all_tiles += others;
      tiles_before += is_before(shared.experts[i]) ? others : 0;
    });
    const int32_t step = even_tiles ? even_tile_rows(rows, rows_of_tile) : rows_of_tile;
    list_tiles(to, expert, rows_before, rows, step, tiles_before, tiles);
  }
  // body(i, values[i]) of all choices, four at a time: those beyond are -1 and 0.
  template <class Body>
  __device__ static void each(const ChoiceIds& args, const int32_t* values, const Body& body) {
#pragma unroll 2
    for (int32_t i = 0; i < static_cast<int32_t>(args.choices); i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(values + i);
      body(i, four.x), body(i + 1, four.y), body(i + 2, four.z), body(i + 3, four.w);
    }
  }

 private:
  __device__ bool is_before(int32_t other) const {
    return static_cast<uint32_t>(other) < static_cast<uint32_t>(expert);  // -1 is before none
  }
};

}  // namespace nvfp4_moe::cuda
