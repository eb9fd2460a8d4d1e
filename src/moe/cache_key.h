// The key of an entry of the packed cache: a hash of everything that the packed bytes depend on.
//
// Two ways to know the source. By place and time, which costs kilobytes an expert: for each shard
// its real path, device, inode, size, times of modification and of change, its header, and of the
// layer's experts every scalar and 512 bytes in the middle of every matrix. Copies that keep size
// and time (tar, cp -p, image layers) differ in the rest. Or by content (`checksum`): headers and
// all bytes of all shards, and not their paths: a copy or another mount of the same bytes finds the
// same entry.
//
// Writes through a shared mapping set a file's times only when a page becomes dirty. A page that is
// dirty already may be written to without a trace, so each file is written back before its times
// are read: that makes its pages clean, and the next write sets new times. Memory file systems
// (tmpfs) do not do that: there the layer's experts are read whole.
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
// A hash of the source's place and times. If it is equal before and after a load, nobody wrote
// meanwhile.
Result<ContentHash> cache_source_state(const CacheSubject& subject);
// The part of it that reads the experts: their scalars, and the middle of each of their matrices,
// or all of it.
Result<ContentHash> cache_sample_hash(const CacheSubject& subject, bool whole = false);

// The entry's file name: one for each place in a model and for each checkpoint directory, so that a
// stale entry is replaced, and two models share a cache directory without replacing each other's.
std::string cache_entry_name(const CacheSubject& subject);

}  // namespace nvfp4_moe::internal
