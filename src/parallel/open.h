// Opening a layer whose experts are divided over the ranks of an exchange.
#pragma once

#include <memory>
#include <optional>

#include "moe/packed_cache.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {

// config and source are those of the whole layer; options.range is left alone, and
// options.limits.max_tokens is for the tokens of this rank's batch, the same on all. A rank that
// cannot open ends all with its message; ranks that do not agree are refused by name, on every
// rank. Collective, as the layer's runs are.
Result<std::unique_ptr<MoeLayer>> open_over_ranks(const MoeConfig& config,
                                                  const LayerSource& source,
                                                  const LayerOptions& options,
                                                  const ExpertParallelOptions& parallel,
                                                  std::shared_ptr<Exchange> exchange,
                                                  const ProgressFn& progress = {});
// The same on this very backend.
Result<std::unique_ptr<MoeLayer>> open_over_ranks_on(
    const Backend& backend, const MoeConfig& config, const LayerSource& source,
    const LayerOptions& options, const ExpertParallelOptions& parallel,
    std::shared_ptr<Exchange> exchange, const ProgressFn& progress = {});
// The same for a checkpoint's layer, from which each rank reads only the experts of its slots.
// config: none takes the checkpoint's.
Result<std::unique_ptr<MoeLayer>> open_checkpoint_over_ranks(
    const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& config,
    const LayerOptions& options, const ExpertParallelOptions& parallel,
    std::shared_ptr<Exchange> exchange, const ProgressFn& progress = {});

// An exchange and how a layer is divided over it. If an optional one is taken, none means one rank.
struct Parallel {
  std::shared_ptr<Exchange> exchange;
  ExpertParallelOptions options;
};
// MoeLayer::open and open_checkpoint_layer, or over ranks, which have no slice and no cache.
Result<std::unique_ptr<MoeLayer>> open_layer(const MoeConfig& config, const LayerSource& source,
                                             const LayerOptions& options,
                                             const std::optional<Parallel>& parallel,
                                             const ProgressFn& progress = {});
Result<std::unique_ptr<MoeLayer>> open_layer(const Checkpoint& checkpoint, int64_t layer,
                                             const std::optional<MoeOptions>& config,
                                             const IntermediateSlice& slice,
                                             const LayerOptions& options, const CacheOptions& cache,
                                             const std::optional<Parallel>& parallel,
                                             const ProgressFn& progress = {});

// A checkpoint's layer, each expert of which is validated when it is loaded: a rank reads the
// experts of its slots and no others.
Result<LayerSource> validated_source(const Checkpoint& checkpoint, int64_t layer, bool shared);

}  // namespace nvfp4_moe::internal
