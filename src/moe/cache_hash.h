// The hash of the packed cache: XXH3 with 128 bits, fed in parts. It finds damage and tells files apart; it is no
// defence against somebody who may write the file (moe/cache_file.h says who may).
#pragma once

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nvfp4_moe {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const Hash128&) const = default;
};

class Hasher {
 public:
  Hasher() { XXH3_128bits_reset(&state_); }
  void bytes(const void* data, size_t size) { XXH3_128bits_update(&state_, data, size); }
  void number(int64_t value) { bytes(&value, sizeof(value)); }
  void text(std::string_view value) {  // with its length, so that neighbours cannot swap characters
    number(static_cast<int64_t>(value.size()));
    bytes(value.data(), value.size());
  }
  Hash128 digest() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.low64, hash.high64};
  }

 private:
  XXH3_state_t state_;
};

inline Hash128 hash_of(const void* data, size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(data, size);
  return {hash.low64, hash.high64};
}

// 32 hexadecimal digits.
inline std::string hex(const Hash128& hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint64_t half : {hash.high, hash.low})
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(half >> shift) & 15];
  return text;
}

}  // namespace nvfp4_moe
