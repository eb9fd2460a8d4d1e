// CSF: a lossless coding of block scales. Local Inference Lab publishes checkpoints in it, and
// FlashInfer reads its streams on GPUs.
//
// A matrix of scale bytes (rows, cols) becomes two streams. Scales are bytes here: signs, NaN and
// zero have no special place.
//
//   fixed       rows / 16 tiles. A tile has a base byte for each of its 16 rows, and then the rows'
//               codes. A scale is base + code, and base + the largest code is at most 255.
//   exceptions  32-bit words, ascending by their low 24 bits: row * cols + col. The high 8 bits
//               replace the scale there.
//
//   codec   scales  code    of a row          base      cols
//   NVFP4   E4M3    4 bits  cols / 2 bytes    0 to 240  even
//   MXFP4   E8M0    1 bit   ceil(cols/8)      0 to 254  any; unused bits are 0
//
// Codes begin at the low bits of a byte. The encoder takes the lowest base that covers the most
// scales of the row, and writes code 0 at exceptions: the rule of published checkpoints, so that
// encoding decoded scales gives back their streams.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal {

enum class CsfCodec : uint8_t { kNvfp4, kMxfp4 };

// The codec's name in the manifest of a container.
std::string_view csf_codec_name(CsfCodec codec);
// The end of a stream's name, after the name of the scales: ".nvfp4_csf_fixed".
std::string_view csf_fixed_suffix(CsfCodec codec);
std::string_view csf_exceptions_suffix(CsfCodec codec);

// Bytes of a tile's 16 rows, and of the whole fixed stream.
int64_t csf_tile_bytes(CsfCodec codec, int64_t cols);
inline int64_t csf_fixed_bytes(CsfCodec codec, int64_t rows, int64_t cols) {
  return rows / 16 * csf_tile_bytes(codec, cols);
}
// kUnsupported if no streams can hold such a matrix: rows in tiles of 16, and positions in 24 bits.
Status check_csf_shape(CsfCodec codec, int64_t rows, int64_t cols);

// Decodes tiles `first` to `first` + `count` - 1 of a matrix (rows, cols) that
// check_csf_shape accepts. fixed: the bytes of these tiles; exceptions: those of the whole matrix.
// out: (16 * count, cols). kBadInput if a base is too large, an unused bit is set, or the
// exceptions do not ascend within the matrix; out is then undefined.
Status decode_csf(CsfCodec codec, std::span<const uint8_t> fixed,
                  std::span<const uint32_t> exceptions, int64_t rows, int64_t cols, int64_t first,
                  int64_t count, uint8_t* out);

struct CsfStreams {
  std::vector<uint8_t> fixed;
  std::vector<uint32_t> exceptions;
};
// Encodes scales (rows, cols), contiguous, of a shape that check_csf_shape accepts.
CsfStreams encode_csf(CsfCodec codec, std::span<const uint8_t> scales, int64_t rows, int64_t cols);

}  // namespace nvfp4_moe::internal
