// One file of the packed cache: a layer's local experts as one backend packed them, in the host's
// byte order.
//
//   [0, 4096)                 CacheHeader, zero-padded
//   [4096, + scales)          tensor scales, (experts, 3) float, and under fp8 after them
//                             (experts, 3) CachedFp8Weights; zero-padded to a multiple of 4096
//   [payload_offset, + size)  PackedWeights::bytes
//
// Hashes cover every byte: head_hash everything before the payload, padding included, except
// itself; payload_hash the payload. Nothing follows the payload. The payload's hash is a hash over
// hashes of 4 MiB parts, so that threads can share the work.
//
// An entry is read into memory, not mapped. So nobody can change or truncate the data that a layer
// computes with, and a file that is truncated during the read is an error, not a signal.
// cache_folder.h defines which entries are trusted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/buffer.h"
#include "core/executor.h"
#include "core/status.h"
#include "io/content_hash.h"
#include "moe/cache_folder.h"

namespace nvfp4_moe::internal {

inline constexpr size_t kCachePage = 4096;
inline constexpr char kCacheMagic[8] = {'N', 'V', 'F', '4', 'P', 'A', 'C', 'K'};
inline constexpr uint32_t kCacheVersion = 2;

struct CacheHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;  // sizeof(CacheHeader)
  ContentHash key;
  uint64_t scale_sets;      // number of (gate, up, down) tensor scale rows
  uint64_t payload_offset;  // a multiple of 4096
  uint64_t payload_bytes;
  ContentHash payload_hash;
  ContentHash head_hash;  // of [0, payload_offset) with this field zero
};
static_assert(sizeof(CacheHeader) == 88);

// Fp8Weights without padding.
struct CachedFp8Weights {
  int64_t shift;
  uint64_t inexact;
};
static_assert(sizeof(CachedFp8Weights) == 16);

// The properties that a file must have. Its key covers whether it has fp8 weights.
struct CacheRequest {
  ContentHash key;
  size_t scale_sets = 0;     // (gate, up, down) rows, one for each expert
  size_t payload_bytes = 0;  // size of the packed weights
  bool unchecked = false;    // skip the comparison of the payload's hash
  bool fp8 = false;          // fp8 weights follow the scales
};

struct CachedLayer {
  Buffer payload;
  std::vector<TensorScales> scales;           // (scale_sets), finite and not negative
  std::vector<Fp8ExpertWeights> fp8_weights;  // (scale_sets) with valid shifts, or empty
};

// Reads the entry if it matches `request`; otherwise the Status is the reason. Opens only regular
// files, follows no links and never blocks.
Result<CachedLayer> read_cache_file(const CacheFolder& folder, const std::string& name,
                                    const CacheRequest& request, Executor& executor);

// Writes the entry to a temporary file in the same folder, syncs it and renames it into place.
// mode: its permissions, before the umask. fp8_weights: as many as scales, or empty.
Status write_cache_file(const CacheFolder& folder, const std::string& name, mode_t mode,
                        const ContentHash& key, const std::vector<TensorScales>& scales,
                        const std::vector<Fp8ExpertWeights>& fp8_weights, const std::byte* payload,
                        size_t payload_bytes, Executor& executor);

// The two hashes, for tools that write files. head: [0, payload_offset).
ContentHash cache_head_hash(const std::vector<std::byte>& head);
ContentHash cache_payload_hash(const std::byte* payload, size_t payload_bytes, Executor& executor);

}  // namespace nvfp4_moe::internal
