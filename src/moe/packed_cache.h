// Packed layers kept on disk and read on the next start, without packing.
//
// See cache_file.h for the content of an entry, cache_key.h for what it stands for, and
// cache_folder.h for whose entries are believed. An entry with another key, or with a byte changed
// anywhere, is not used: the layer is packed again and the file replaced. It is written under
// another name and renamed, so that no reader sees half of one, and any number of processes may
// share a folder. In a folder that others may write to nothing is read and nothing is written.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "moe/layer.h"

namespace nvfp4_moe::internal {

struct CacheOptions {
  std::string directory;  // made if it is not there; empty: no cache
  // the source is known by all its bytes, and not by place, times and samples
  bool checksum = false;
  bool unchecked = false;  // the packed payload is used without its hash being compared: a disk's
                           // damage goes unseen
};

struct CacheOutcome {
  bool hit = false;
  std::string path;    // of the cache file; empty without a cache
  std::string reason;  // why a file that was there was not used, or could not be written; empty:
                       // nothing to say
};

class PackedCache {
 public:
  // MoeLayer::open on a checkpoint's layer by way of the cache. What is packed is validated first:
  // an error finding is kBadInput. A cache that cannot be used is a reason in `outcome`, never a
  // failure: the layer is then packed from the checkpoint.
  static Result<std::unique_ptr<MoeLayer>> open(const Checkpoint& checkpoint, int64_t layer,
                                                const MoeConfig& config,
                                                const IntermediateSlice& slice,
                                                const LayerOptions& options,
                                                const CacheOptions& cache,
                                                const ProgressFn& progress, CacheOutcome* outcome);
};

// Opens a checkpoint's layer: validates its local experts (an error finding is kBadInput), takes
// the config from the checkpoint unless one is given, with the activation format of the rule, and
// loads through the cache or from the files. outcome may be null.
Result<std::unique_ptr<MoeLayer>> open_checkpoint_layer(
    const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& config,
    const IntermediateSlice& slice, const LayerOptions& options, const CacheOptions& cache = {},
    const ProgressFn& progress = {}, CacheOutcome* outcome = nullptr);
// The layer's sizes and options, with a slice's sizes in place of the whole's and the declared
// activation format.
Result<MoeOptions> sliced_options(const Checkpoint& checkpoint, int64_t layer,
                                  const IntermediateSlice& slice);

// The config that a layer of a checkpoint is opened with: the given one, of the checkpoint's sizes,
// or the checkpoint's with the activation format of the rule.
Result<MoeConfig> checkpoint_config(const Checkpoint& checkpoint, int64_t layer,
                                    const std::optional<MoeOptions>& given,
                                    const IntermediateSlice& slice, const LayerOptions& options);
// kBadInput with the first error finding of these experts.
Status refuse_errors(const Checkpoint& checkpoint, int64_t layer, const ExpertRange& range);

}  // namespace nvfp4_moe::internal
