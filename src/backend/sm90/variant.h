// The compiled tile shapes of the Hopper GEMMs, and which of them a call takes.
//
// A tile is row_blocks x 128 weight rows times up to `lines` lines of activations. The host knows how many rows an
// expert has on average, not how many each has: a variant must hold almost every expert's rows in one tile, since a
// second tile reads the expert's weights again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "core/config.h"

namespace nvfp4_moe::sm90 {

inline constexpr int kSharedBytes = 227 * 1024;  // of one block, at most
inline constexpr int kMostBlocks = 144;          // one a multiprocessor; no Hopper has more

struct Variant {
  int lines;          // N of the widest product
  int least_lines;    // of the narrowest: a tile takes the narrowest that holds its lines
  int width_step;     // from one product to the next, a multiple of 8
  int row_blocks;     // of 128 weight rows
  int group_steps;    // k16 steps of one commit group
  double most_rows;   // taken up to so many rows an expert, on average
  bool tensor_lines;  // lines come by tensor copies, not by 16 bytes a thread
  const char* name;
  // Sums of a piece that is not a whole unit.
  constexpr int64_t partial_bytes() const { return int64_t{row_blocks} * 128 * lines * 4; }
};
inline constexpr std::array<Variant, 6> kVariants = {{
    {8, 8, 8, 2, 4, 2.5, false, "wgmma_256x8"},
    {8, 8, 8, 4, 2, 2.5, false, "wgmma_512x8"},
    {16, 8, 8, 4, 2, 8.0, false, "wgmma_512x16"},
    {32, 8, 8, 4, 2, 19.0, false, "wgmma_512x32"},
    {64, 24, 8, 2, 4, 50.0, true, "wgmma_256x64"},
    {128, 48, 16, 2, 2, 1e30, true, "wgmma_256x128"},
}};

// Whether gemm1 says which routed rows have NaN or Inf, where requantize does not look at them.
inline bool flags_rows(const MoeConfig& config, const Variant& variant) {
  return variant.tensor_lines && config->activation_format == ActivationFormat::kBf16;
}

// Units are cut along K where K is long enough to share, and where bits may depend on the batch.
inline bool splits(const MoeConfig& config, int64_t k_tiles) { return !config->batch_invariant && k_tiles >= 4; }

// Where weights are what a GEMM waits for, finishing a cut unit takes as long as reading so many bytes of them: units
// are not cut for less.
inline constexpr int64_t kCutBytes = 80 * 1024;
// The same of a wide tile, in chunks.
inline constexpr int64_t kCutChunks = 10;
inline constexpr int32_t kMostPieces = 4;
constexpr int64_t least_saved_chunks(const Variant& variant) {
  return variant.tensor_lines ? kCutChunks : cuda::ceil_div(kCutBytes, variant.row_blocks * cuda::kTileBytes);
}
// Whoever finishes a cut unit reads the sums of all its pieces, each of which takes as long as multiplying a chunk
// where tiles are wide.
constexpr int32_t most_pieces(const Variant& variant) { return variant.tensor_lines ? kMostPieces : 1 << 15; }

// The first variant is taken in place of the second where a multiprocessor has few chunks of 512 weight rows: there
// smaller ones are shared out more evenly, and the last one to arrive leaves less to multiply.
inline constexpr int64_t kFewChunks = 24;  // of one GEMM and multiprocessor
inline size_t routed_variant(const MoeConfig& config, const ExpertRange& range, int64_t tokens) {
  const int64_t rows = tokens * config->top_k;
  size_t index = 1;
  while (static_cast<double>(rows) / static_cast<double>(config->num_experts) > kVariants[index].most_rows) ++index;
  if (index != 1) return index;
  const int64_t local_rows = cuda::ceil_div(rows * range.count, config->num_experts);
  const int64_t chunks =
      local_rows * cuda::ceil_div(config->intermediate_size, 256) * cuda::ceil_div(config->hidden_size, cuda::kTileK);
  return chunks <= kFewChunks * kMostBlocks ? 0 : 1;
}
// The shared expert's rows are known; one tile up to the largest variant's.
inline size_t shared_variant(int64_t tokens) {
  size_t index = 1;
  while (index + 1 < kVariants.size() && tokens > kVariants[index].lines) ++index;
  return index;
}

}  // namespace nvfp4_moe::sm90
