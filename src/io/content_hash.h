// A 128-bit hash (XXH3) that detects changed content: shards of an earlier run, sources, caches. It
// detects accidents, not forgeries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/status.h"

namespace nvfp4_moe::internal {

struct ContentHash {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const ContentHash&) const = default;
};
std::string to_string(const ContentHash& hash);  // 32 hexadecimal digits
std::optional<ContentHash> content_hash_from_string(std::string_view text);

class ContentHasher {
 public:
  ContentHasher();
  ContentHasher(ContentHasher&&) noexcept;
  ContentHasher& operator=(ContentHasher&&) noexcept;
  ~ContentHasher();
  void bytes(const void* data, size_t size_bytes);
  void number(int64_t value);
  void text(std::string_view value);  // with its length, so that texts cannot exchange characters
  ContentHash digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

ContentHash content_hash(const void* data, size_t size_bytes);
// Hashes a regular file's bytes, read once from end to end. `path` is not a link. The file's pages
// are dropped from the page cache afterwards.
Result<ContentHash> hash_file(const std::string& path);

}  // namespace nvfp4_moe::internal
