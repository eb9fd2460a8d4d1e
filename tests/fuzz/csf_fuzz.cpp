// Bytes as streams of CSF: refused with one line, or decoded, the same in parts as whole, and their
// encoding decodes to the same scales.
//
// Bytes 0 to 2: codec, tiles, columns. The fixed stream follows, with zeros if the input is short,
// and then whole words of exceptions.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/csf.h"
#include "fuzz/require.h"

using namespace nvfp4_moe::internal;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const CsfCodec codec = data[0] % 2 == 0 ? CsfCodec::kNvfp4 : CsfCodec::kMxfp4;
  const int64_t tiles = 1 + data[1] % 4, rows = 16 * tiles, cols = 1 + data[2] % 40;
  if (const Status shape = check_csf_shape(codec, rows, cols); !shape.ok()) {
    REQUIRE(shape.code() == Code::kUnsupported && codec == CsfCodec::kNvfp4 && cols % 2 == 1);
    return 0;
  }
  std::vector<uint8_t> rest(data + 3, data + size);
  std::vector<uint8_t> fixed(static_cast<size_t>(csf_fixed_bytes(codec, rows, cols)));
  const size_t given = std::min(fixed.size(), rest.size());
  std::copy_n(rest.begin(), given, fixed.begin());
  std::vector<uint32_t> words((rest.size() - given) / 4);
  if (!words.empty()) std::memcpy(words.data(), rest.data() + given, words.size() * 4);

  std::vector<uint8_t> scales(static_cast<size_t>(rows * cols));
  const Status decoded = decode_csf(codec, fixed, words, rows, cols, 0, tiles, scales.data());
  if (!decoded.ok()) {
    REQUIRE(decoded.code() == Code::kBadInput && !decoded.message().empty());
    for (const char c : decoded.message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
    return 0;
  }
  const auto tile_bytes = static_cast<size_t>(csf_tile_bytes(codec, cols));
  std::vector<uint8_t> tile(static_cast<size_t>(16 * cols));
  for (int64_t s = 0; s < tiles; ++s) {
    const std::span<const uint8_t> part(fixed.data() + static_cast<size_t>(s) * tile_bytes,
                                        tile_bytes);
    REQUIRE(decode_csf(codec, part, words, rows, cols, s, 1, tile.data()).ok());
    REQUIRE(std::equal(tile.begin(), tile.end(), scales.begin() + s * 16 * cols));
  }
  const CsfStreams again = encode_csf(codec, scales, rows, cols);
  REQUIRE(again.exceptions.size() <= scales.size() && again.fixed.size() == fixed.size());
  std::vector<uint8_t> back(scales.size());
  REQUIRE(decode_csf(codec, again.fixed, again.exceptions, rows, cols, 0, tiles, back.data()).ok());
  REQUIRE(back == scales);
  return 0;
}
