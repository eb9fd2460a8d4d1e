#include "moe/cache_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "io/files.h"
#include "moe/cache_folder.h"

namespace nvfp4_moe::internal {
namespace {

// of the payload per hash: the work of one task
constexpr size_t kHashBytes = size_t{4} << 20;
constexpr size_t kReadBytes = size_t{256} << 10;  // read and hashed at once: fits into the L2 cache

size_t page_up(size_t bytes) { return (bytes + kCachePage - 1) / kCachePage * kCachePage; }
constexpr size_t kFp8Bytes = 3 * sizeof(CachedFp8Weights);  // per expert
size_t head_bytes(size_t scale_sets, bool fp8) {
  return kCachePage + page_up(scale_sets * (sizeof(TensorScales) + (fp8 ? kFp8Bytes : 0)));
}

// The fp8 weights of `count` experts at `bytes`.
Result<std::vector<Fp8ExpertWeights>> fp8_from(const std::string& shown, const std::byte* bytes,
                                               size_t count) {
  std::vector<Fp8ExpertWeights> all(count);
  for (size_t e = 0; e < count; ++e) {
    CachedFp8Weights cached[3];
    std::memcpy(cached, bytes + e * kFp8Bytes, sizeof(cached));
    Fp8Weights* const to[] = {&all[e].gate, &all[e].up, &all[e].down};
    for (size_t p = 0; p < 3; ++p) {
      if (cached[p].shift < kFp8LeastShift || cached[p].shift > kFp8MostShift)
        return bad_input(shown + ": fp8 shift: expected " + std::to_string(kFp8LeastShift) + ".." +
                         std::to_string(kFp8MostShift) + ", got " +
                         std::to_string(cached[p].shift));
      *to[p] = {static_cast<int32_t>(cached[p].shift), cached[p].inexact};
    }
  }
  return all;
}

void fp8_to(const std::vector<Fp8ExpertWeights>& all, std::byte* bytes) {
  for (const Fp8ExpertWeights& expert : all) {
    const CachedFp8Weights cached[] = {{expert.gate.shift, expert.gate.inexact},
                                       {expert.up.shift, expert.up.inexact},
                                       {expert.down.shift, expert.down.inexact}};
    std::memcpy(bytes, cached, sizeof(cached));
    bytes += sizeof(cached);
  }
}

struct Descriptor {
  int file = -1;
  ~Descriptor() {
    if (file >= 0) ::close(file);
  }
};

const char* kind_of(mode_t mode) {
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// Whether all of [offset, offset + size) could be read; errno is 0 if the file ended.
bool read_at(int file, void* to, size_t size, size_t offset) {
  auto* bytes = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t got = ::pread(file, bytes, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    if (got <= 0) return false;
    bytes += got;
    offset += static_cast<size_t>(got);
    size -= static_cast<size_t>(got);
  }
  return true;
}

Status read_error(const std::string& shown, int error_number) {
  if (error_number != 0) return errno_status(shown, "cannot read", error_number);
  return bad_input(shown +
                   ": expected a file that keeps its size, got one that was cut while it was read");
}

// One hash over the hashes of the payload's parts. hash_part(offset, size) computes the hash of one
// part; any thread may call it.
template <class HashPart>
ContentHash hash_of_parts(size_t payload_bytes, Executor& executor, const HashPart& hash_part) {
  const size_t parts = (payload_bytes + kHashBytes - 1) / kHashBytes;
  std::vector<ContentHash> hashes(parts);
  executor.parallel_for(static_cast<int64_t>(parts), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
      hashes[i] = hash_part(i * kHashBytes, std::min(kHashBytes, payload_bytes - i * kHashBytes));
  });
  return content_hash(hashes.data(), hashes.size() * sizeof(ContentHash));
}

// Reads the payload and hashes each part while it is in cache.
Result<ContentHash> read_payload(int file, const std::string& shown, size_t offset,
                                 const Buffer& to, bool hashed, Executor& executor) {
  std::atomic<bool> failed{false};
  std::atomic<int> error_number{0};
  const ContentHash hash = hash_of_parts(to.size_bytes(), executor, [&](size_t first, size_t size) {
    ContentHasher hasher;
    for (size_t at = 0; at < size && !failed.load(std::memory_order_relaxed); at += kReadBytes) {
      const size_t count = std::min(kReadBytes, size - at);
      std::byte* const bytes = to.data() + first + at;
      if (!read_at(file, bytes, count, offset + first + at)) {
        error_number = errno;
        failed = true;
      } else if (hashed) {
        hasher.bytes(bytes, count);
      }
    }
    return hasher.digest();
  });
  if (failed) return read_error(shown, error_number);
  return hash;
}

Status write_all(int file, const std::string& path, const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(file, bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return errno_status(path, "cannot write", written < 0 ? errno : ENOSPC);
    bytes += written;
    size -= static_cast<size_t>(written);
  }
  return {};
}

// Checks that the head matches the request: sizes, key, hash, scales.
Status check_head(const std::string& shown, const std::vector<std::byte>& head,
                  const CacheRequest& request, const std::vector<TensorScales>& scales) {
  CacheHeader header;
  std::memcpy(&header, head.data(), sizeof(header));
  if (std::memcmp(header.magic, kCacheMagic, sizeof(kCacheMagic)) != 0 ||
      header.version != kCacheVersion || header.header_bytes != sizeof(CacheHeader))
    return bad_input(shown + ": expected a packed cache of version " +
                     std::to_string(kCacheVersion) + ", got another file");
  if (!(header.key == request.key))
    return bad_input(shown + ": expected key " + to_string(request.key) + ", got " +
                     to_string(header.key));
  if (header.scale_sets != request.scale_sets || header.payload_offset != head.size() ||
      header.payload_bytes != request.payload_bytes)
    return bad_input(shown + ": expected " + std::to_string(request.payload_bytes) +
                     " packed bytes of " + std::to_string(request.scale_sets) + " experts, got " +
                     std::to_string(header.payload_bytes) + " of " +
                     std::to_string(header.scale_sets));
  if (const ContentHash hash = cache_head_hash(head); !(hash == header.head_hash))
    return bad_input(shown + ": head hash: expected " + to_string(header.head_hash) + ", got " +
                     to_string(hash));
  for (const TensorScales& one : scales)
    for (const float scale : {one.gate, one.up, one.down})
      if (!std::isfinite(scale) || scale < 0)
        return bad_input(shown + ": tensor scale: expected a finite number >= 0, got " +
                         std::to_string(scale));
  return {};
}

}  // namespace

ContentHash cache_head_hash(const std::vector<std::byte>& head) {
  constexpr size_t kBefore = offsetof(CacheHeader, head_hash);
  const ContentHash zero;
  ContentHasher hasher;
  hasher.bytes(head.data(), kBefore);
  hasher.bytes(&zero, sizeof(zero));
  hasher.bytes(head.data() + kBefore + sizeof(zero), head.size() - kBefore - sizeof(zero));
  return hasher.digest();
}

ContentHash cache_payload_hash(const std::byte* payload, size_t payload_bytes, Executor& executor) {
  return hash_of_parts(payload_bytes, executor, [payload](size_t first, size_t size) {
    return content_hash(payload + first, size);
  });
}

Result<CachedLayer> read_cache_file(const CacheFolder& folder, const std::string& name,
                                    const CacheRequest& request, Executor& executor) {
  const std::string path = folder.file(name), shown = printable(path, 4096);
  struct stat facts {};
  // Check before opening, since opening a device may have effects; check again below, since the
  // name may refer to another file by then.
  if (::fstatat(folder.descriptor(), name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0)
    return errno_status(path, "cannot stat", errno);
  if (!S_ISREG(facts.st_mode))
    return bad_input(shown + ": expected a regular file, got " + kind_of(facts.st_mode));
  const Descriptor descriptor{::openat(folder.descriptor(), name.c_str(),
                                       O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY)};
  const int file = descriptor.file;
  if (file < 0) return errno_status(path, "cannot open", errno);
  if (::fstat(file, &facts) != 0) return errno_status(path, "cannot stat", errno);
  if (!S_ISREG(facts.st_mode))
    return bad_input(shown + ": expected a regular file, got " + kind_of(facts.st_mode));
  NVFP4_MOE_TRY(check_cache_owner(shown, facts));

  std::vector<std::byte> head(head_bytes(request.scale_sets, request.fp8));
  const size_t file_bytes = head.size() + request.payload_bytes;
  if (static_cast<uint64_t>(facts.st_size) != file_bytes)
    return bad_input(shown + ": expected " + std::to_string(file_bytes) + " bytes, got " +
                     std::to_string(facts.st_size));
  if (!read_at(file, head.data(), head.size(), 0)) return read_error(shown, errno);
  CachedLayer cached;
  cached.scales.resize(request.scale_sets);
  std::memcpy(cached.scales.data(), head.data() + kCachePage,
              cached.scales.size() * sizeof(TensorScales));
  NVFP4_MOE_TRY(check_head(shown, head, request, cached.scales));
  if (request.fp8) {
    const std::byte* const behind =
        head.data() + kCachePage + cached.scales.size() * sizeof(TensorScales);
    NVFP4_MOE_ASSIGN(cached.fp8_weights, fp8_from(shown, behind, request.scale_sets));
  }
  NVFP4_MOE_ASSIGN(cached.payload,
                   allocate_pages(request.payload_bytes, "packed weights of a cache"));
  NVFP4_MOE_ASSIGN(const ContentHash hash, read_payload(file, shown, head.size(), cached.payload,
                                                        !request.unchecked, executor));
  CacheHeader header;
  std::memcpy(&header, head.data(), sizeof(header));
  if (!request.unchecked && !(hash == header.payload_hash))
    return bad_input(shown + ": payload hash: expected " + to_string(header.payload_hash) +
                     ", got " + to_string(hash));
  return cached;
}

Status write_cache_file(const CacheFolder& folder, const std::string& name, mode_t mode,
                        const ContentHash& key, const std::vector<TensorScales>& scales,
                        const std::vector<Fp8ExpertWeights>& fp8_weights, const std::byte* payload,
                        size_t payload_bytes, Executor& executor) {
  NVFP4_MOE_ASSIGN(CachePart part, CachePart::create(folder, name, mode));
  struct stat facts {};
  if (::fstat(part.descriptor(), &facts) != 0)
    return errno_status(part.path(), "cannot stat", errno);
  // On a file system that lets everybody write, files are rejected when they are read: report that
  // and write nothing.
  NVFP4_MOE_TRY(check_cache_owner(printable(part.path(), 4096), facts));

  CacheHeader header{};
  std::memcpy(header.magic, kCacheMagic, sizeof(kCacheMagic));
  header.version = kCacheVersion;
  header.header_bytes = sizeof(CacheHeader);
  header.key = key;
  header.scale_sets = scales.size();
  header.payload_offset = head_bytes(scales.size(), !fp8_weights.empty());
  header.payload_bytes = payload_bytes;
  header.payload_hash = cache_payload_hash(payload, payload_bytes, executor);
  std::vector<std::byte> head(header.payload_offset);
  std::memcpy(head.data(), &header, sizeof(header));
  std::memcpy(head.data() + kCachePage, scales.data(), scales.size() * sizeof(TensorScales));
  fp8_to(fp8_weights, head.data() + kCachePage + scales.size() * sizeof(TensorScales));
  header.head_hash = cache_head_hash(head);
  std::memcpy(head.data(), &header, sizeof(header));

  NVFP4_MOE_TRY(write_all(part.descriptor(), part.path(), head.data(), head.size()));
  NVFP4_MOE_TRY(write_all(part.descriptor(), part.path(), payload, payload_bytes));
  return part.rename_to(name);
}

}  // namespace nvfp4_moe::internal
