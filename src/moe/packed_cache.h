// Packed layers kept on disk and read at the next start, without packing.
//
// cache_file.h describes an entry, cache_key.h its key, and cache_folder.h which entries are
// trusted. An entry with another key, or with any byte changed, is not used: the layer is packed
// again and the file replaced. Entries are written under a temporary name and renamed, so no reader
// sees a partial one, and any number of processes may share a folder. A folder that others may
// write to is neither read nor written.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "moe/layer.h"

namespace nvfp4_moe::internal {

struct CacheOptions {
  std::string directory;  // created if it does not exist; empty: no cache
  // identifies the source by all its bytes, not by place, times and samples
  bool checksum = false;
  // skips the comparison of the packed payload's hash: disk corruption goes undetected
  bool unchecked = false;
};

struct CacheOutcome {
  bool hit = false;
  std::string path;  // of the cache file; empty without a cache
  // why an existing file was not used, or could not be written; empty if neither
  std::string reason;
};

class PackedCache {
 public:
  // MoeLayer::open for a checkpoint's layer through the cache. Experts are validated before
  // packing: an error finding is kBadInput. An unusable cache is never a failure: `outcome` has the
  // reason, and the layer is packed from the checkpoint.
  static Result<std::unique_ptr<MoeLayer>> open(const Checkpoint& checkpoint, int64_t layer,
                                                const MoeConfig& config,
                                                const IntermediateSlice& slice,
                                                const LayerOptions& options,
                                                const CacheOptions& cache,
                                                const ProgressFn& progress, CacheOutcome* outcome);
};

// Opens a checkpoint's layer. Validates its local experts (an error finding is kBadInput). Takes
// the config from the checkpoint, with the activation format of the rule, unless one is given.
// Loads through the cache or from the files. outcome may be null.
Result<std::unique_ptr<MoeLayer>> open_checkpoint_layer(
    const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& config,
    const IntermediateSlice& slice, const LayerOptions& options, const CacheOptions& cache = {},
    const ProgressFn& progress = {}, CacheOutcome* outcome = nullptr);
// The layer's sizes and options, with a slice's sizes and the declared activation format.
Result<MoeOptions> sliced_options(const Checkpoint& checkpoint, int64_t layer,
                                  const IntermediateSlice& slice);

// The config for opening a checkpoint's layer: the given one, which must have the checkpoint's
// sizes, or the checkpoint's with the activation format of the rule.
Result<MoeConfig> checkpoint_config(const Checkpoint& checkpoint, int64_t layer,
                                    const std::optional<MoeOptions>& given,
                                    const IntermediateSlice& slice, const LayerOptions& options);
// kBadInput with the first error finding of these experts.
Status refuse_errors(const Checkpoint& checkpoint, int64_t layer, const ExpertRange& range);

}  // namespace nvfp4_moe::internal
