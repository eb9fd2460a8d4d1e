#include "moe/packed_cache.h"

#include <filesystem>

#include "moe/cache_file.h"
#include "moe/cache_key.h"
#include "moe/cache_parts.h"
#include "moe/registry.h"
#include "safetensors/output_file.h"

namespace nvfp4_moe {

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

Result<std::unique_ptr<MoeLayer>> PackedCache::open(const Checkpoint& checkpoint, int64_t layer_index,
                                                    const MoeConfig& config, const IntermediateSlice& slice,
                                                    const LayerOptions& options, const CacheOptions& cache,
                                                    const ProgressFn& progress, CacheOutcome* outcome) {
  CacheOutcome unused;
  CacheOutcome& result = outcome == nullptr ? unused : *outcome;
  result = {};
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  // Before anything is planned for the sizes that the config claims.
  const ExpertRange range = options.range.count > 0 ? options.range : ExpertRange{0, config->num_experts};
  NVFP4_MOE_TRY(checkpoint.check_layout(layer_index, range, config->shared_intermediate_size > 0));
  NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint, layer_index, slice));
  NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(options.backend, env));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_ASSIGN(const Backend* backend, choose_backend(config, device, forced));
  NVFP4_MOE_ASSIGN(auto layer, MoeLayer::prepare(*backend, config, source.scales, options, env));
  PackedWeights& weights = *layer->weights_;

  std::optional<ContentHash> key;
  const bool host = backend->memory == nullptr;  // a device's bytes cannot be mapped from a file
  if (!cache.directory.empty() && host) {
    const CacheSubject subject{checkpoint, layer_index, config, weights.range, source.scales, slice, *backend};
    NVFP4_MOE_ASSIGN(key, cache_key(subject, cache.checksum));
    std::error_code error;
    (void)make_directories(cache.directory).ok();  // failing shows when the file is written
    result.path = (std::filesystem::path(cache.directory) / cache_entry_name(subject)).string();
    const CacheRequest request{*key, weights.tensor_scales.size(), backend->packed_bytes(config, weights.range),
                               cache.unchecked, config->activation_format == ActivationFormat::kFp8};
    auto mapped = read_cache_file(result.path, request, *layer->executor_);
    if (mapped.ok()) {
      weights.bytes = std::move(mapped->payload);
      weights.tensor_scales = std::move(mapped->scales);
      weights.fp8_weights = std::move(mapped->fp8_weights);
      result.hit = true;
    } else if (std::filesystem::symlink_status(result.path, error).type() != std::filesystem::file_type::not_found) {
      result.reason = mapped.status().message();
    }
  }
  if (!result.hit) {  // what a cache holds was judged before it was written
    NVFP4_MOE_TRY(refuse_errors(checkpoint, layer_index, weights.range));
    NVFP4_MOE_TRY(layer->pack(source, progress));
    if (key) {
      sweep_cache_parts(cache.directory);  // before the disk is asked for more
      const Status written = write_cache_file(result.path, *key, weights.tensor_scales, weights.fp8_weights,
                                              weights.bytes.data(), weights.bytes.size_bytes(), *layer->executor_);
      if (!written.ok()) result.reason += (result.reason.empty() ? "" : "; ") + written.message();
    }
  }
  if (!result.reason.empty()) log_line(LogLevel::kWarning, "packed cache not used: " + result.reason);
  NVFP4_MOE_TRY(layer->attach_debug(env, options));
  return layer;
}

Result<MoeOptions> sliced_options(const Checkpoint& checkpoint, int64_t layer, const IntermediateSlice& slice) {
  NVFP4_MOE_ASSIGN(MoeOptions options, checkpoint.layer_options(layer));
  if (slice.count == 0) return options;
  const int64_t whole = options.intermediate_size;
  if (slice.first < 0 || slice.count < 0 || slice.first > whole || slice.count > whole - slice.first)
    return invalid_argument("intermediate slice: expected a part of [0, " + std::to_string(whole) + "), got first " +
                            std::to_string(slice.first) + " count " + std::to_string(slice.count));
  options.shared_intermediate_size = options.shared_intermediate_size * slice.count / whole;
  options.intermediate_size = slice.count;
  return options;
}

namespace {

// Sizes are the files': a smaller number of experts would leave the others out in silence, while tokens that are routed
// to them arrive. The shared expert may be left out.
Status check_sizes(const MoeOptions& given, const MoeOptions& stored) {
  const auto check = [](const char* name, int64_t value, int64_t expected, const char* instead) -> Status {
    if (value == expected) return {};
    return invalid_argument(std::string(name) + ": expected the checkpoint's " + std::to_string(expected) + ", got " +
                            std::to_string(value) + instead);
  };
  NVFP4_MOE_TRY(check("num_experts", given.num_experts, stored.num_experts,
                      " (a rank's part of the experts is asked for by first expert and count)"));
  NVFP4_MOE_TRY(check("hidden_size", given.hidden_size, stored.hidden_size, ""));
  NVFP4_MOE_TRY(check("intermediate_size", given.intermediate_size, stored.intermediate_size,
                      " (a rank's part of it is asked for as a slice)"));
  if (given.shared_intermediate_size == 0) return {};
  return check("shared_intermediate_size", given.shared_intermediate_size, stored.shared_intermediate_size,
               " (0 leaves the shared expert out)");
}

}  // namespace

Result<MoeConfig> checkpoint_config(const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& given,
                                    const IntermediateSlice& slice) {
  NVFP4_MOE_ASSIGN(const MoeOptions stored, sliced_options(checkpoint, layer, slice));
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(given.value_or(stored)));
  NVFP4_MOE_TRY(check_sizes(config.options(), stored));
  return config;
}

Result<std::unique_ptr<MoeLayer>> open_checkpoint_layer(const Checkpoint& checkpoint, int64_t layer,
                                                        const std::optional<MoeOptions>& given,
                                                        const IntermediateSlice& slice, const LayerOptions& options,
                                                        const CacheOptions& cache, const ProgressFn& progress,
                                                        CacheOutcome* outcome) {
  NVFP4_MOE_ASSIGN(const MoeConfig config, checkpoint_config(checkpoint, layer, given, slice));
  const int64_t experts = config->num_experts;
  ExpertRange range = options.range;
  if (range.count == 0 && range.first == 0) range.count = experts;
  if (range.first < 0 || range.count < 1 || range.count > experts || range.first > experts - range.count)
    return invalid_argument("expert range: expected a part of [0, " + std::to_string(experts) + "), got first " +
                            std::to_string(range.first) + " count " + std::to_string(range.count));
  return PackedCache::open(checkpoint, layer, config, slice, options, cache, progress, outcome);
}

}  // namespace nvfp4_moe
