#include "moe/packed_cache.h"

#include <fcntl.h>

#include <cerrno>

#include "io/files.h"
#include "moe/activation_choice.h"
#include "moe/cache_file.h"
#include "moe/cache_folder.h"
#include "moe/cache_key.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {

// Error findings stop a load; the first is reported.
Status refuse_errors(const Checkpoint& checkpoint, int64_t layer, const ExpertRange& range) {
  NVFP4_MOE_ASSIGN(const std::vector<Finding> findings, checkpoint.validate(layer, range));
  int64_t errors = 0;
  const Finding* first = nullptr;
  for (const Finding& finding : findings) {
    if (finding.severity != Severity::kError) continue;
    if (errors++ == 0) first = &finding;
  }
  if (errors == 0) return {};
  return error_of(*first, errors - 1);
}

Result<std::unique_ptr<MoeLayer>> PackedCache::open(
    const Checkpoint& checkpoint, int64_t layer_index, const MoeConfig& config,
    const IntermediateSlice& slice, const LayerOptions& options, const CacheOptions& cache,
    const ProgressFn& progress, CacheOutcome* outcome) {
  CacheOutcome unused;
  CacheOutcome& result = outcome == nullptr ? unused : *outcome;
  result = {};
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  // Check before anything is planned for sizes that the config claims.
  const ExpertRange range =
      options.range.count > 0 ? options.range : ExpertRange{0, config->num_experts};
  NVFP4_MOE_TRY(checkpoint.check_layout(layer_index, range, config->shared_intermediate_size > 0));
  NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint, layer_index, slice));
  NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(options.backend, env));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_ASSIGN(const BackendSelection selected,
                   choose_backend_to_open(config, device, forced, env));
  const Backend* const backend = selected.backend;
  NVFP4_MOE_ASSIGN(auto layer, MoeLayer::prepare(*backend, config, source.scales, options, env));
  layer->set_self_check(selected.check);
  layer->declared_ = source.declared;
  PackedWeights& weights = *layer->weights_;

  const CacheSubject subject{checkpoint,    layer_index, config,  weights.range,
                             source.scales, slice,       *backend};
  std::optional<CacheFolder> folder;
  // a device's weights are never read from a cache
  const bool wanted = !cache.directory.empty() && backend->memory == nullptr;
  const bool public_source = wanted && readable_by_everybody(checkpoint.index().files());
  if (wanted) {
    auto opened = CacheFolder::open(cache.directory, public_source ? 0755 : 0700);
    if (opened.ok())
      folder.emplace(std::move(*opened));
    else
      result.reason = opened.status().message();
  }
  ContentHash state, key;
  std::string entry;
  if (folder) {
    entry = cache_entry_name(subject);
    NVFP4_MOE_ASSIGN(state, cache_source_state(subject));
    NVFP4_MOE_ASSIGN(key, cache_key(subject, cache.checksum, state));
    result.path = folder->file(entry);
    const CacheRequest request{key, weights.tensor_scales.size(),
                               backend->packed_bytes(config, weights.range), cache.unchecked,
                               config->activation_format == ActivationFormat::kFp8};
    auto cached = read_cache_file(*folder, entry, request, *layer->executor_);
    struct stat facts {};
    if (cached.ok()) {
      weights.bytes = std::move(cached->payload);
      weights.tensor_scales = std::move(cached->scales);
      weights.fp8_weights = std::move(cached->fp8_weights);
      result.hit = true;
    } else if (::fstatat(folder->descriptor(), entry.c_str(), &facts, AT_SYMLINK_NOFOLLOW) == 0 ||
               errno != ENOENT) {
      result.reason = cached.status().message();
    }
  }
  if (!result.hit) {  // a cached layer was validated before it was written
    NVFP4_MOE_TRY(refuse_errors(checkpoint, layer_index, weights.range));
    NVFP4_MOE_TRY(layer->pack(source, progress));
    const auto write = [&]() -> Status {
      sweep_cache_parts(*folder);  // free disk space first
      NVFP4_MOE_ASSIGN(const ContentHash now, cache_source_state(subject));
      if (!(now == state))
        return bad_input(
            printable(checkpoint.index().directory(), 4096) +
            ": the checkpoint was written to while it was packed, so nothing is kept of it");
      return write_cache_file(*folder, entry, public_source ? 0644 : 0600, key,
                              weights.tensor_scales, weights.fp8_weights, weights.bytes.data(),
                              weights.bytes.size_bytes(), *layer->executor_);
    };
    if (folder) {
      const Status written = write();
      if (!written.ok()) result.reason += (result.reason.empty() ? "" : "; ") + written.message();
    }
  }
  if (!result.reason.empty())
    log_line(LogLevel::kWarning, "packed cache not used: " + result.reason);
  NVFP4_MOE_TRY(layer->attach_debug(env, options, source.name));
  return layer;
}

Result<MoeOptions> sliced_options(const Checkpoint& checkpoint, int64_t layer,
                                  const IntermediateSlice& slice) {
  NVFP4_MOE_ASSIGN(MoeOptions options, checkpoint.layer_options(layer));
  if (slice.count == 0) return options;
  const int64_t whole = options.intermediate_size;
  if (slice.first < 0 || slice.count < 0 || slice.first > whole ||
      slice.count > whole - slice.first)
    return invalid_argument("intermediate slice: expected a part of [0, " + std::to_string(whole) +
                            "), got first " + std::to_string(slice.first) + " count " +
                            std::to_string(slice.count));
  options.shared_intermediate_size = options.shared_intermediate_size * slice.count / whole;
  options.intermediate_size = slice.count;
  return options;
}

namespace {

// Sizes must match the files: with a smaller number of experts, tokens could still be routed to the
// missing ones. The shared expert may be left out.
Status check_sizes(const MoeOptions& given, const MoeOptions& stored) {
  const auto check = [](const char* name, int64_t value, int64_t expected,
                        const char* instead) -> Status {
    if (value == expected) return {};
    return invalid_argument(std::string(name) + ": expected the checkpoint's " +
                            std::to_string(expected) + ", got " + std::to_string(value) + instead);
  };
  NVFP4_MOE_TRY(check("num_experts", given.num_experts, stored.num_experts,
                      " (a rank's part of the experts is asked for by first expert and count)"));
  NVFP4_MOE_TRY(check("hidden_size", given.hidden_size, stored.hidden_size, ""));
  NVFP4_MOE_TRY(check("intermediate_size", given.intermediate_size, stored.intermediate_size,
                      " (a rank's part of it is asked for as a slice)"));
  if (given.shared_intermediate_size == 0) return {};
  return check("shared_intermediate_size", given.shared_intermediate_size,
               stored.shared_intermediate_size, " (0 leaves the shared expert out)");
}

}  // namespace

Result<MoeConfig> checkpoint_config(const Checkpoint& checkpoint, int64_t layer,
                                    const std::optional<MoeOptions>& given,
                                    const IntermediateSlice& slice, const LayerOptions& options) {
  NVFP4_MOE_ASSIGN(const MoeOptions stored, sliced_options(checkpoint, layer, slice));
  MoeOptions wanted = stored;
  if (given) {
    wanted = *given;
  } else {
    NVFP4_MOE_ASSIGN(wanted, with_chosen_format(stored, options));
  }
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(wanted));
  NVFP4_MOE_TRY(check_sizes(config.options(), stored));
  return config;
}

Result<std::unique_ptr<MoeLayer>> open_checkpoint_layer(
    const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& given,
    const IntermediateSlice& slice, const LayerOptions& options, const CacheOptions& cache,
    const ProgressFn& progress, CacheOutcome* outcome) {
  NVFP4_MOE_ASSIGN(const MoeConfig config,
                   checkpoint_config(checkpoint, layer, given, slice, options));
  const int64_t experts = config->num_experts;
  ExpertRange range = options.range;
  if (range.count == 0 && range.first == 0) range.count = experts;
  if (range.first < 0 || range.count < 1 || range.count > experts ||
      range.first > experts - range.count)
    return invalid_argument("expert range: expected a part of [0, " + std::to_string(experts) +
                            "), got first " + std::to_string(range.first) + " count " +
                            std::to_string(range.count));
  return PackedCache::open(checkpoint, layer, config, slice, options, cache, progress, outcome);
}

}  // namespace nvfp4_moe::internal
