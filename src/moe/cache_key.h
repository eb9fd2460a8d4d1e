// The key of an entry of the packed cache: a hash of everything that the packed bytes depend on.
//
// The source is identified in one of two ways:
// - By place and time (the default), which reads a few kilobytes per expert: each shard's real
//   path, device, inode, size, modification and change times and header; and of the layer's experts
//   every scalar and 512 bytes from the middle of every matrix. Copies that keep size and time
//   (tar, cp -p, image layers) differ in the rest.
// - By content (`checksum`): headers and all bytes of all shards, but not their paths. A copy or
//   another mount of the same bytes then finds the same entry.
//
// Writes through a shared mapping update a file's times only when a page becomes dirty. A page that
// is already dirty can change without a trace. So each file is written back before its times are
// read: its pages are then clean, and the next write updates the times. Memory file systems (tmpfs)
// do not do that, so there the layer's experts are read whole.
#pragma once

#include <string>

#include "io/content_hash.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal {

struct CacheSubject {
  const Checkpoint& checkpoint;
  int64_t layer;
  const MoeConfig& config;
  ExpertRange range;
  LayerScales scales;
  IntermediateSlice slice;
  const Backend& backend;
};

// state: cache_source_state() of the subject.
Result<ContentHash> cache_key(const CacheSubject& subject, bool checksum, const ContentHash& state);
// A hash of the source's place and times. If it is the same before and after a load, nobody wrote
// in between.
Result<ContentHash> cache_source_state(const CacheSubject& subject);
// The part of that hash that reads the experts: their scalars, and the middle of each matrix, or
// all of it if `whole`.
Result<ContentHash> cache_sample_hash(const CacheSubject& subject, bool whole = false);

// The entry's file name. It is unique for each part of a model and each checkpoint directory, so
// that a stale entry is replaced and several models can share a cache directory.
std::string cache_entry_name(const CacheSubject& subject);

}  // namespace nvfp4_moe::internal
