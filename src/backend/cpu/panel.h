// The packed layout of the CPU backend: panels of 16 output rows, one sequential stream of codes
// and scales.
//
// A matrix W (rows, K) becomes ceil(rows/16) panels; a panel is ceil(K/64) chunks of 576 bytes:
//   4 blocks of 16 along K x 128 bytes of codes, then 4 blocks x 16 rows of block scales
//   (64 bytes).
//   Within a block: two 64-byte vectors v = 0, 1; lane r (row r of the panel) is 4 bytes; byte j of
//   lane r holds k = 8 v + j in the low nibble and k = 8 v + 4 + j in the high nibble.
// The two nibbles of a 32-bit lane are four consecutive k each: the operand order of 8-bit
// dot-product instructions, so that every instruction set reads the same bytes. Rows and K beyond
// the matrix are code 0 with scale 0. An expert is its gate and up panels alternating (so a SwiGLU
// tile reads one range of memory), or only its up panels if there is no gate; then its down panels.
#pragma once

#include <cstdint>

#include "core/config.h"
#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal::cpu {

inline constexpr int64_t kPanelRows = 16;
inline constexpr int64_t kChunkK = 64;
inline constexpr int64_t kBlocksPerChunk = 4;
inline constexpr int64_t kBlockCodesBytes = 128;
inline constexpr int64_t kChunkScalesOffset = kBlocksPerChunk * kBlockCodesBytes;          // 512
inline constexpr int64_t kChunkBytes = kChunkScalesOffset + kBlocksPerChunk * kPanelRows;  // 576

constexpr int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }
constexpr int64_t chunks_of(int64_t k) { return (k + kChunkK - 1) / kChunkK; }
constexpr int64_t panel_bytes(int64_t k) { return chunks_of(k) * kChunkBytes; }

// Offsets of an expert's panels, from its first byte.
struct ExpertPanels {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t matrices = 2;  // of gemm1: gate and up, or only up

  // gemm1's panels: gate's and up's.
  int64_t gemm1_panels() const { return matrices * panels_of(intermediate); }
  int64_t gate(int64_t panel) const { return matrices * panel * panel_bytes(hidden); }
  int64_t up(int64_t panel) const {
    return (matrices * panel + matrices - 1) * panel_bytes(hidden);
  }
  int64_t down(int64_t panel) const {
    return gemm1_panels() * panel_bytes(hidden) + panel * panel_bytes(intermediate);
  }
  int64_t bytes() const { return down(panels_of(hidden)); }
};

inline ExpertPanels expert_panels(const MoeConfig& config, int64_t intermediate_size) {
  return {config->hidden_size, intermediate_size, has_gate(config->activation) ? 2 : 1};
}
inline ExpertPanels routed_panels(const MoeConfig& config) {
  return expert_panels(config, config->intermediate_size);
}
inline ExpertPanels shared_panels(const MoeConfig& config) {
  return expert_panels(config, config->shared_intermediate_size);
}

// Writes panel `panel` of the matrix, panel_bytes(source.cols) long.
void pack_panel(const Nvfp4View& source, int64_t panel, uint8_t* out);
// The inverse: the panel's rows of codes (rows, cols/2) and block_scales (rows, cols/16),
// contiguous.
void unpack_panel(const uint8_t* packed, int64_t panel, int64_t rows, int64_t cols, uint8_t* codes,
                  uint8_t* block_scales);

}  // namespace nvfp4_moe::internal::cpu
