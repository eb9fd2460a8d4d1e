// Sizes that the steps' kernels are compiled for or need at run time: what the planner on the host
// and the kernels on the device both have to know.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

// ---- tiles of rows

inline constexpr int kMinTileN = 8;  // of any backend that shares route
// Rows of each of an expert's tiles but the last, if they share its rows evenly instead of filling
// all but the last. Multiples of 8; as many tiles as full ones, and none is empty.
NVFP4_MOE_HOST_DEVICE constexpr int32_t even_tile_rows(int32_t rows, int32_t tile_n) {
  if (rows <= tile_n) return rows == 0 ? tile_n : (rows + 7) / 8 * 8;  // no division for most
  const int32_t tiles = (rows + tile_n - 1) / tile_n;
  return (rows + 8 * tiles - 1) / (8 * tiles) * 8;
}
// Up to that many rows in all a rank's tiles are narrow, if they may also be wide: a full one an
// expert.
inline int64_t max_narrow_rows(int64_t experts, int tile_n) { return experts * tile_n; }
// No routing gives more tiles than this: each expert with rows has one that may not be full.
inline int64_t tile_bound(int64_t rows, int64_t experts, int tile_n) {
  return std::min(rows, rows / tile_n + experts);
}

// ---- route

inline constexpr int kSmallBatch = 32;               // assignments that one warp routes by shuffles
inline constexpr int64_t kOneCtaAssignments = 2048;  // up to that many are routed by one CTA
// assignments that one CTA counts and scatters, if there are more
inline constexpr int kRouteSlice = 1024;
inline constexpr int kRouteSegment = 128;           // assignments of one bit mask
inline constexpr int64_t kMaxScatteredSlices = 64;  // that every CTA may scan for itself
inline constexpr int kRouteSmallThreads = 256, kRouteLargeThreads = 1024;
inline constexpr int kAssignmentsPerThread = 4;  // of one CTA by bits, at most
inline constexpr int64_t kRouteCounterBytes = 40 * 1024,
                         kRouteMaxWarps = 8;  // of one CTA that sorts by slices
// Tiles are listed in the order of their rows where their products differ much and each expert can
// read all others: CTAs that take turns at the list then get the same work.
inline constexpr int kMinSortedTileN = 32;
inline constexpr int64_t kMaxSortedExperts = 1024;
inline constexpr int64_t kTileKeyBytes = 8;
// Shared memory that every kernel may have without asking, and what route's kernels declare
// besides.
inline constexpr int64_t kSharedBytesOfAll = 48 * 1024, kRouteStaticBytes = 2048;

// Shared memory of one CTA that routes by bits: masks, counts of earlier segments, first rows,
// keys, the order of rows.
constexpr int64_t route_bits_bytes(int64_t assignments, int64_t experts, bool widest_first) {
  return (ceil_div(assignments, kRouteSegment) * 18 + (widest_first ? kTileKeyBytes : 0) + 4) *
             experts +
         assignments * 2;
}
// Of a CTA that scans all slices and scatters one by bits: masks and first rows by segment, rows
// and starts.
inline constexpr int32_t kSliceSegments = kRouteSlice / kRouteSegment;
constexpr int64_t scatter_bits_bytes(int64_t experts) {
  return (kSliceSegments * 20 + 8) * experts;
}

// ---- quantize

inline constexpr int kRowThreads = 256;       // that work on a row of any type, at most
inline constexpr int kVec8Threads = 1024;     // on a row by vec8, at most
inline constexpr int kWarpRowThreads = 256;   // of a CTA whose warps have a row each
inline constexpr int kIntoRowsThreads = 128;  // of a CTA that rounds a token into its rows
// from here on a warp has a row: there are enough to fill the device
inline constexpr int64_t kManyRows = 2048;
// up to here a CTA has as many threads as it can use
inline constexpr int64_t kSmallVec8Rows = 512;
// Elements of a tile's rows up to which gemm2 may quantize them as it loads them.
inline constexpr double kMaxRequantizedTile = 9216;
// No more threads than there are blocks of 16 to quantize, or vec8.
inline int row_threads(int64_t k) {
  return static_cast<int>(std::min<int64_t>(kRowThreads, (k / 16 + 31) / 32 * 32));
}
// A CTA of many threads is done soonest; smaller ones fill a multiprocessor.
inline int vec8_threads(int64_t k, int64_t rows) {
  const int64_t most = rows <= kSmallVec8Rows ? kVec8Threads : 512, turns = ceil_div(k / 8, most);
  return static_cast<int>(std::max<int64_t>(1, ceil_div(k / 8, 32 * turns)) * 32);
}

// ---- combine

inline constexpr int kCombineThreads = 128;
// Channels of a thread: wide reads if the memory is the limit, short code if a CTA runs it once.
inline constexpr int kLargeCombineChannels = 8, kSmallCombineChannels = 4;
inline constexpr int64_t kSmallCombineTokens = 64;
// from here on a CTA does a whole token: its assignments are read once
inline constexpr int64_t kLargeCombineTokens = 2048;

}  // namespace nvfp4_moe::internal::cuda
