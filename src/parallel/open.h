// Opens a layer whose experts are divided over the ranks of an exchange.
#pragma once

#include <memory>
#include <optional>

#include "moe/packed_cache.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {

// An exchange and how a layer is divided over it. An empty optional<Parallel> means one rank.
struct Parallel {
  std::shared_ptr<Exchange> exchange;
  ExpertParallelOptions options;
};
// MoeLayer::open, or with `parallel` the same over ranks: config and source describe the whole
// layer. options.limits.max_tokens is for this rank's batch and must be the same on all ranks.
// Collective, as the layer's runs are. If one rank cannot open, all fail with its message; if ranks
// disagree, with the name of the field that differs.
Result<std::unique_ptr<MoeLayer>> open_layer(const MoeConfig& config, const LayerSource& source,
                                             const LayerOptions& options,
                                             const std::optional<Parallel>& parallel,
                                             const ProgressFn& progress = {});
// open_checkpoint_layer, or with `parallel` the same over ranks, which support neither a slice nor
// a cache. Each rank reads only the experts of its slots. config: if empty, the checkpoint's.
Result<std::unique_ptr<MoeLayer>> open_layer(const Checkpoint& checkpoint, int64_t layer,
                                             const std::optional<MoeOptions>& config,
                                             const IntermediateSlice& slice,
                                             const LayerOptions& options, const CacheOptions& cache,
                                             const std::optional<Parallel>& parallel,
                                             const ProgressFn& progress = {});
// Over ranks, on a given backend.
Result<std::unique_ptr<MoeLayer>> open_over_ranks_on(
    const Backend& backend, const MoeConfig& config, const LayerSource& source,
    const LayerOptions& options, const Parallel& parallel, const ProgressFn& progress = {});

// The selection of all ranks, if the self-check of some of them failed: the backend with the lowest
// priority that a rank fell back to. On the other ranks the check has failed too, naming that rank,
// so that all describe the same. A rank whose backend is forced by name keeps its own. Collective.
Result<BackendSelection> backend_of_all(const BackendSelection& mine, const MoeConfig& config,
                                        const DeviceFacts& device, const std::string& forced,
                                        Exchange& exchange);

// A checkpoint's layer whose experts are validated as they are loaded, so a rank reads only the
// experts of its slots.
Result<LayerSource> validated_source(const Checkpoint& checkpoint, int64_t layer, bool shared);
// Identifies a layer's weights with few reads: a hash of how the checkpoint is interpreted, and of
// tensors of the first, middle, last and shared expert (names, shapes, up to 512 bytes of each).
// Copies of a checkpoint in other files have the same hash, no matter which experts a rank reads.
Result<std::string> weights_id(const Checkpoint& checkpoint, int64_t layer);

}  // namespace nvfp4_moe::internal
