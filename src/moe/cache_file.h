// One file of the packed cache: a layer's local experts as one backend packed them, in the host's
// byte order.
//
//   [0, 4096)                 CacheHeader, zero-padded
//   [4096, + scales)          tensor scales, (experts, 3) float, and under fp8 behind them
//                             (experts, 3) CachedFp8Weights; zero-padded to a multiple of 4096
//   [payload_offset, + size)  PackedWeights::bytes
//
// Every byte is under a hash: head_hash covers all in front of the payload but itself, padding
// included, payload_hash the payload, and nothing lies behind it. The payload's hash is one of
// hashes of 4 MiB each, so that threads share it.
//
// An entry is read into memory and not mapped: nobody can change or cut what a layer computes with,
// and a file that is cut while it is read is an error and no signal. cache_folder.h says whose
// entries are used.
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
  uint64_t scale_sets;      // rows of the tensor scales
  uint64_t payload_offset;  // multiple of 4096
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

// Requirements on a file. Whether it has fp8 weights is part of its key.
struct CacheRequest {
  ContentHash key;
  size_t scale_sets = 0;     // (gate, up, down) of each expert
  size_t payload_bytes = 0;  // of the packed weights
  bool unchecked = false;    // the payload is read without its hash being compared
  bool fp8 = false;          // fp8 weights of each expert as well
};

struct CachedLayer {
  Buffer payload;
  std::vector<TensorScales> scales;           // (scale_sets), finite and not negative
  std::vector<Fp8ExpertWeights> fp8_weights;  // (scale_sets) of legal shifts, or none
};

// Reads the entry if it is what `request` asks for; else the Status says why it is not. Opens
// nothing but a regular file, follows no link and never waits.
Result<CachedLayer> read_cache_file(const CacheFolder& folder, const std::string& name,
                                    const CacheRequest& request, Executor& executor);

// Writes the entry next to its name, syncs it and renames it into place. mode: its permissions,
// less the umask. fp8_weights: the same number as scales, or none.
Status write_cache_file(const CacheFolder& folder, const std::string& name, mode_t mode,
                        const ContentHash& key, const std::vector<TensorScales>& scales,
                        const std::vector<Fp8ExpertWeights>& fp8_weights, const std::byte* payload,
                        size_t payload_bytes, Executor& executor);

// The two hashes, for tools that make files. head: [0, payload_offset).
ContentHash cache_head_hash(const std::vector<std::byte>& head);
ContentHash cache_payload_hash(const std::byte* payload, size_t payload_bytes, Executor& executor);

}  // namespace nvfp4_moe::internal
