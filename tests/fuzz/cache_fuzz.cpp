// Bytes as a file of the packed cache: it is accepted if and only if it is, byte for byte, the file
// that its own scales and payload make.
//
// An input is the file without its padding: a byte of flags, header (88), scales (3 sets), payload
// (64), and then changes of three bytes each, a position anywhere in the file and the value to put
// there. Flags 1, 2 and 4 put the right sizes and key, the right payload hash, and the right head
// hash into the header, so that the fuzzer need not invert hashes. Flag 8 takes the input unchanged
// as the file.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fuzz/require.h"
#include "fuzz/temporary.h"
#include "moe/cache_file.h"

using namespace nvfp4_moe::internal;

namespace {

constexpr size_t kSets = 3;
constexpr size_t kPayload = 64;
constexpr size_t kHead = 2 * kCachePage;
constexpr ContentHash kKey{0x1234, 0x5678};

void fix(std::vector<std::byte>& file, uint8_t flags) {
  CacheHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  if ((flags & 1) != 0) {
    std::memcpy(header.magic, kCacheMagic, sizeof(kCacheMagic));
    header.version = kCacheVersion;
    header.header_bytes = sizeof(CacheHeader);
    header.key = kKey;
    header.scale_sets = kSets;
    header.payload_offset = kHead;
    header.payload_bytes = kPayload;
  }
  if ((flags & 2) != 0)
    header.payload_hash = cache_payload_hash(file.data() + kHead, kPayload, serial_executor());
  std::memcpy(file.data(), &header, sizeof(header));
  if ((flags & 4) != 0) {
    header.head_hash = cache_head_hash({file.begin(), file.begin() + kHead});
    std::memcpy(file.data(), &header, sizeof(header));
  }
}

bool is_whole(const std::vector<std::byte>& file) {
  if (file.size() != kHead + kPayload) return false;
  std::vector<std::byte> expected = file;
  fix(expected, 7);
  float scales[kSets * 3];
  std::memcpy(scales, file.data() + kCachePage, sizeof(scales));
  const bool legal =
      std::all_of(scales, scales + kSets * 3, [](float s) { return std::isfinite(s) && s >= 0; });
  return legal && expected == file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::TemporaryDirectory directory;
  static const std::string path = directory.file("layer.packed");
  static const auto folder = CacheFolder::open(directory.path());
  if (size == 0) return 0;
  const uint8_t flags = *data++;
  --size;
  std::vector<std::byte> file;
  if ((flags & 8) != 0) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(data);
    file.assign(bytes, bytes + size);
  } else {
    file.resize(kHead + kPayload);
    const auto take = [&](size_t offset, size_t count) {
      count = std::min(count, size);
      std::copy_n(reinterpret_cast<const std::byte*>(data), count,
                  file.begin() + static_cast<ptrdiff_t>(offset));
      data += count;
      size -= count;
    };
    take(0, sizeof(CacheHeader));
    take(kCachePage, kSets * sizeof(TensorScales));
    take(kHead, kPayload);
    fix(file, flags);
    for (; size >= 3; data += 3, size -= 3)
      file[(data[0] | data[1] << 8) % file.size()] = std::byte{data[2]};
  }
  fuzz::write_file(path, {reinterpret_cast<const char*>(file.data()), file.size()});

  const auto mapped =
      read_cache_file(*folder, "layer.packed", {kKey, kSets, kPayload, false}, serial_executor());
  REQUIRE(mapped.ok() == is_whole(file));
  if (mapped.ok()) {
    REQUIRE(mapped->payload.size_bytes() == kPayload && mapped->scales.size() == kSets);
    REQUIRE(std::memcmp(mapped->payload.data(), file.data() + kHead, kPayload) == 0);
  } else {
    REQUIRE(mapped.status().code() == Code::kBadInput && !mapped.status().message().empty());
  }
  return 0;
}
