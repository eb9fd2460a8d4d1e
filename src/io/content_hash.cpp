#include "io/content_hash.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <vector>

#include "io/files.h"
#include "io/open_file.h"

namespace nvfp4_moe::internal {

std::string to_string(const ContentHash& hash) {
  return fmt::format("{:016x}{:016x}", hash.high, hash.low);
}

std::optional<ContentHash> content_hash_from_string(std::string_view text) {
  if (text.size() != 32) return std::nullopt;
  uint64_t halves[2] = {};
  for (size_t i = 0; i < 32; ++i) {
    const char c = text[i];
    int digit = 0;
    if (c >= '0' && c <= '9')
      digit = c - '0';
    else if (c >= 'a' && c <= 'f')
      digit = c - 'a' + 10;
    else
      return std::nullopt;
    halves[i / 16] = halves[i / 16] << 4 | static_cast<uint64_t>(digit);
  }
  return ContentHash{halves[1], halves[0]};
}

struct ContentHasher::State {
  XXH3_state_t xxh3;
};

ContentHasher::ContentHasher() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh3);
}
ContentHasher::ContentHasher(ContentHasher&&) noexcept = default;
ContentHasher& ContentHasher::operator=(ContentHasher&&) noexcept = default;
ContentHasher::~ContentHasher() = default;

void ContentHasher::bytes(const void* data, size_t size_bytes) {
  if (size_bytes > 0) XXH3_128bits_update(&state_->xxh3, data, size_bytes);
}

void ContentHasher::number(int64_t value) { bytes(&value, sizeof value); }

void ContentHasher::text(std::string_view value) {
  number(static_cast<int64_t>(value.size()));
  bytes(value.data(), value.size());
}

ContentHash ContentHasher::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  return {hash.low64, hash.high64};
}

ContentHash content_hash(const void* data, size_t size_bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, size_bytes);
  return {hash.low64, hash.high64};
}

Result<ContentHash> hash_file(const std::string& path) {
  NVFP4_MOE_ASSIGN(const RegularFile file, open_regular_file(path, Links::kRefuse));
  const int fd = file.descriptor.get();
  (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  ContentHasher hasher;
  std::vector<std::byte> bytes(size_t{4} << 20);
  for (off_t at = 0;;) {
    const ssize_t got = ::read(fd, bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(path, "cannot read", errno);
    if (got == 0) return hasher.digest();
    hasher.bytes(bytes.data(), static_cast<size_t>(got));
    (void)::posix_fadvise(fd, at, got, POSIX_FADV_DONTNEED);
    at += got;
  }
}

}  // namespace nvfp4_moe::internal
