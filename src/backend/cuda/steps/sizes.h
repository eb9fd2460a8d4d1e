// Sizes of the steps' kernels, at compile time or run time, shared by the planner on the host and
// the kernels on the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

// ---- tiles of rows

inline constexpr int kMinTileN = 8;  // of all backends that share route
// Rows per tile if tiles divide an expert's rows evenly, instead of filling all but the last.
// Multiples of 8. There are as many tiles as full ones would need, and none is empty.
NVFP4_MOE_HOST_DEVICE constexpr int32_t even_tile_rows(int32_t rows, int32_t tile_n) {
  // the common case needs no division
  if (rows <= tile_n) return rows == 0 ? tile_n : (rows + 7) / 8 * 8;
  const int32_t tiles = (rows + tile_n - 1) / tile_n;
  return (rows + 8 * tiles - 1) / (8 * tiles) * 8;
}
// With at most this many rows a rank uses narrow tiles, if wide tiles are an option: one full
// narrow tile per expert.
inline int64_t max_narrow_rows(int64_t experts, int tile_n) { return experts * tile_n; }
// Upper bound of the number of tiles: rounding up adds at most one tile per expert with rows.
inline int64_t tile_bound(int64_t rows, int64_t experts, int tile_n) {
  return std::min(rows, rows / tile_n + experts);
}

// ---- route

inline constexpr int kSmallBatch = 32;               // assignments that one warp routes by shuffles
inline constexpr int64_t kOneCtaAssignments = 2048;  // up to this many are routed by one CTA
// assignments that each CTA counts and scatters, if there are more
inline constexpr int kRouteSlice = 1024;
inline constexpr int kRouteSegment = 128;           // assignments of one bit mask
inline constexpr int64_t kMaxScatteredSlices = 64;  // that every CTA may scan on its own
inline constexpr int kRouteSmallThreads = 256, kRouteLargeThreads = 1024;
inline constexpr int kAssignmentsPerThread = 4;  // maximum in one CTA with bit masks
inline constexpr int64_t kRouteCounterBytes = 40 * 1024,
                         kRouteMaxWarps = 8;  // for one CTA that sorts by slices
// Tiles are sorted by their rows if their products differ much and few enough experts exist for
// each to read all keys. CTAs that take tiles from the list round-robin then get equal work.
inline constexpr int kMinSortedTileN = 32;
inline constexpr int64_t kMaxSortedExperts = 1024;
inline constexpr int64_t kTileKeyBytes = 8;
// Shared memory that every kernel gets without opting in, and the static shared memory of route's
// kernels.
inline constexpr int64_t kSharedBytesOfAll = 48 * 1024, kRouteStaticBytes = 2048;

// Shared memory of one CTA that routes with bit masks: masks, counts of earlier segments, first
// rows, keys, the order of rows.
constexpr int64_t route_bits_bytes(int64_t assignments, int64_t experts, bool widest_first) {
  return (ceil_div(assignments, kRouteSegment) * 18 + (widest_first ? kTileKeyBytes : 0) + 4) *
             experts +
         assignments * 2;
}
// Shared memory of a CTA that scans all slices and scatters one with bit masks: masks and first
// rows by segment, rows and starts.
inline constexpr int32_t kSliceSegments = kRouteSlice / kRouteSegment;
constexpr int64_t scatter_bits_bytes(int64_t experts) {
  return (kSliceSegments * 20 + 8) * experts;
}

// ---- quantize

inline constexpr int kRowThreads = 256;       // per row of any type; the maximum
inline constexpr int kVec8Threads = 1024;     // per row by vec8; the maximum
inline constexpr int kWarpRowThreads = 256;   // per CTA whose warps have one row each
inline constexpr int kIntoRowsThreads = 128;  // per CTA that rounds a token into its rows
// from here on each warp has a row: there are enough rows to fill the device
inline constexpr int64_t kManyRows = 2048;
// up to here a CTA has as many threads as it can use
inline constexpr int64_t kSmallVec8Rows = 512;
// Maximum elements of a tile's rows that gemm2 may quantize as it loads them.
inline constexpr double kMaxRequantizedTile = 9216;
// At most one thread per block of 16, or per vec8.
inline int row_threads(int64_t k) {
  return static_cast<int>(std::min<int64_t>(kRowThreads, (k / 16 + 31) / 32 * 32));
}
// A CTA with many threads has the lowest latency; smaller ones fill a multiprocessor better.
inline int vec8_threads(int64_t k, int64_t rows) {
  const int64_t most = rows <= kSmallVec8Rows ? kVec8Threads : 512, turns = ceil_div(k / 8, most);
  return static_cast<int>(std::max<int64_t>(1, ceil_div(k / 8, 32 * turns)) * 32);
}

// ---- combine

inline constexpr int kCombineThreads = 128;
// Channels per thread: wide reads if memory is the limit, short code if a CTA runs it once.
inline constexpr int kLargeCombineChannels = 8, kSmallCombineChannels = 4;
inline constexpr int64_t kSmallCombineTokens = 64;
// from here on one CTA does a whole token, so that its assignments are read once
inline constexpr int64_t kLargeCombineTokens = 2048;

}  // namespace nvfp4_moe::internal::cuda
