// Opens a layer over ranks. If one rank fails, all fail with its message.
#include "parallel/open.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <string>

#include "io/json.h"
#include "moe/config_json.h"
#include "moe/env.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

// Facts that must be the same on all ranks: every field of the config, and the inputs from which
// runs are derived.
Exchange::Facts facts_of(const Backend& backend, const MoeConfig& config, const LayerSource& source,
                         const ExpertParallelOptions& options, const Placement& placement,
                         const LayerOptions& layer, const Exchange& exchange) {
  Exchange::Facts facts;
  const Json json = Json::parse(to_json(config.options()));
  for (const auto& [name, value] : json.items()) facts.emplace_back(name, value.dump());
  const auto scale = [](const std::optional<float>& value) {
    return value ? std::to_string(std::bit_cast<uint32_t>(*value)) : std::string("none");
  };
  facts.emplace_back("hidden input_scale (bits)", scale(source.scales.hidden));
  facts.emplace_back("intermediate input_scale (bits)", scale(source.scales.intermediate));
  facts.emplace_back("weights of", source.name.empty() ? "arrays" : source.name);
  facts.emplace_back("hash of weights", source.weights.empty() ? "none" : source.weights);
  facts.emplace_back("combine", to_string(options.combine));
  facts.emplace_back("capacity", std::to_string(options.capacity));
  facts.emplace_back("placement", placement.to_string());
  facts.emplace_back("max_tokens", std::to_string(layer.limits.max_tokens));
  facts.emplace_back("backend", backend.name);
  facts.emplace_back("device", layer.device == "cpu" ? "cpu" : "cuda");
  facts.emplace_back(
      "over", exchange.device_link() != nullptr ? exchange.device_link()->describe() : "host");
  return facts;
}

Result<Placement> placement_of(const MoeConfig& config, const ExpertParallelOptions& parallel,
                               int world) {
  if (!parallel.placement) return Placement::contiguous(config->num_experts, world);
  if (parallel.placement->num_experts() == config->num_experts &&
      parallel.placement->world() == world)
    return *parallel.placement;
  return invalid_argument("placement: expected one of " + std::to_string(config->num_experts) +
                          " experts on " + std::to_string(world) + " ranks, got one of " +
                          std::to_string(parallel.placement->num_experts()) + " experts on " +
                          std::to_string(parallel.placement->world()));
}

Status check_options(const LayerOptions& options, const ExpertParallelOptions& parallel,
                     const Exchange& exchange) {
  NVFP4_MOE_TRY(check_named(parallel.combine));
  if (parallel.capacity < 0)
    return invalid_argument("capacity: expected 0 or more, got " +
                            std::to_string(parallel.capacity));
  if (parallel.capacity > options.limits.max_tokens)
    return invalid_argument("capacity: expected at most max_tokens, " +
                            std::to_string(options.limits.max_tokens) + ", got " +
                            std::to_string(parallel.capacity));
  if (parallel.capacity > 0 && parallel.combine == CombineBy::kAllReduce)
    return invalid_argument("capacity: expected 0 with all_reduce, which sends no tokens, got " +
                            std::to_string(parallel.capacity));
  if (options.device != "cpu" && exchange.device_link() == nullptr)
    return unsupported(
        "device: expected cpu for a layer over an exchange without NCCL or peers, got " +
        options.device);
  if (options.range.first != 0 || options.range.count != 0)
    return invalid_argument(
        "expert range: expected none beside an exchange, which a placement divides, got first " +
        std::to_string(options.range.first) + " count " + std::to_string(options.range.count));
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  if (parallel.combine == CombineBy::kAllToAll && (env.check || !env.dump_directory.empty()))
    return unsupported(
        "NVFP4_MOE_CHECK, NVFP4_MOE_DUMP: expected neither with all_to_all, whose runs they do not "
        "see");
  if (env.check && options.device != "cpu")
    return unsupported("NVFP4_MOE_CHECK: expected 0 for a layer over ranks on a device, got 1");
  return {};
}

// Opens the slots of this rank as a layer of its own.
Result<std::unique_ptr<MoeLayer>> open_rank(const Backend& backend, const Ranks& ranks,
                                            const LayerSource& source, LayerOptions options,
                                            const ProgressFn& progress) {
  const Placement& placement = ranks.placement;
  const int rank = ranks.exchange->rank();
  const bool all_reduce = ranks.options.combine == CombineBy::kAllReduce;
  MoeOptions sizes = ranks.config.options();
  sizes.num_experts = placement.slots();
  // The sum over the ranks includes the shared expert once.
  if (all_reduce && rank != 0) sizes.shared_intermediate_size = 0;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(sizes));
  LayerSource slots = source;
  slots.expert = [&](int64_t slot) -> Result<LoadedExpert> {
    const int64_t expert = placement.expert_of(slot);
    auto loaded = source.expert(expert);
    if (!loaded.ok() && expert != slot)
      return loaded.status().in("expert " + std::to_string(expert) + " of the layer");
    return loaded;
  };
  options.range = {placement.first_slot(rank), placement.slots_of_rank(rank)};
  if (int64_t& tokens = options.limits.max_tokens;
      !all_reduce && __builtin_mul_overflow(ranks.capacity, placement.world(), &tokens))
    tokens = std::numeric_limits<int64_t>::max();
  return MoeLayer::open_on(backend, config, slots, options, progress);
}

}  // namespace

Result<LayerSource> validated_source(const Checkpoint& checkpoint, int64_t layer, bool shared) {
  NVFP4_MOE_ASSIGN(LayerSource source, layer_source(checkpoint, layer, {}));
  NVFP4_MOE_ASSIGN(source.weights, weights_id(checkpoint, layer));
  source.expert = [&checkpoint, layer, shared,
                   load = std::move(source.expert)](int64_t expert) -> Result<LoadedExpert> {
    NVFP4_MOE_TRY(checkpoint.check_layout(layer, {expert, 1}, shared));
    NVFP4_MOE_TRY(refuse_errors(checkpoint, layer, {expert, 1}));
    return load(expert);
  };
  return source;
}

Result<BackendSelection> backend_of_all(const BackendSelection& mine, const MoeConfig& config,
                                        const DeviceFacts& device, const std::string& forced,
                                        Exchange& exchange) {
  using Name = std::array<char, 32>;
  Name name{};  // empty unless this rank fell back
  if (forced == "auto" && mine.check && mine.check->failed())
    std::string_view(mine.backend->name).copy(name.data(), name.size() - 1);
  std::vector<Name> names(static_cast<size_t>(exchange.world()));
  NVFP4_MOE_TRY(exchange.all_gather(name.data(), sizeof(name), names.data()));
  BackendSelection common = mine;
  for (size_t rank = 0; rank < names.size() && forced == "auto"; ++rank) {
    const Backend* const theirs = find_backend(names[rank].data());
    if (theirs == nullptr || theirs->priority >= common.backend->priority ||
        !theirs->supports(config, device).ok())
      continue;
    common.backend = theirs;
    if (mine.check && mine.check->failed()) continue;
    KeptCheck failed;
    failed.outcome.verdict = CheckOutcome::Verdict::kFailed;
    failed.outcome.difference =
        "it failed on rank " + std::to_string(rank) + ", and all ranks use one backend";
    common.check = CheckReport{CheckScope::of(*mine.backend, config), false, failed};
  }
  if (common.backend != mine.backend &&
      KeptChecks::of_process().is_first_warning(common.check->scope, device))
    log_line(LogLevel::kWarning, check_warning(*common.check, *common.backend, device));
  return common;
}

Result<std::unique_ptr<MoeLayer>> open_over_ranks_on(
    const Backend& backend, const MoeConfig& config, const LayerSource& source,
    const LayerOptions& options, const Parallel& divided, const ProgressFn& progress) {
  const std::shared_ptr<Exchange>& exchange = divided.exchange;
  const ExpertParallelOptions& parallel = divided.options;
  const Result<Placement> placement = placement_of(config, parallel, exchange->world());
  NVFP4_MOE_TRY(exchange->agree(placement.ok() ? check_options(options, parallel, *exchange)
                                               : placement.status()));
  NVFP4_MOE_TRY(exchange->check_same(
      "config", facts_of(backend, config, source, parallel, *placement, options, *exchange)));

  const bool fixed =
      parallel.capacity > 0 && (options.device == "cpu" || exchange->peers() == nullptr);
  const int64_t max_tokens = options.limits.max_tokens;
  const Ranks ranks{config,   *placement,    parallel,
                    exchange, max_tokens,    fixed ? parallel.capacity : max_tokens,
                    fixed,    source.weights};
  std::unique_ptr<MoeLayer> layer;
  std::unique_ptr<RankCombine> combine;
  const auto load = [&]() -> Status {
    NVFP4_MOE_ASSIGN(layer, open_rank(backend, ranks, source, options, progress));
    const bool on_host = backend.memory == nullptr;
    if (on_host && backend.steps == nullptr)
      return unsupported(std::string("backend: expected one that is made of steps, got ") +
                         backend.name);
    if (!on_host && (device_ranks(layer->plan().device.kind) == nullptr || options.device == "cpu"))
      return unsupported(std::string("backend: expected one of the host's, got ") + backend.name);
    const auto make = parallel.combine == CombineBy::kAllReduce ? make_all_reduce
                      : on_host                                 ? make_host_all_to_all
                                                                : make_device_all_to_all;
    NVFP4_MOE_ASSIGN(combine, make(*layer, ranks));
    return {};
  };
  Status loaded;
  try {
    loaded = load();
  } catch (...) {  // the other ranks wait: report even an out-of-memory error to them
    loaded = caught_exception();
  }
  NVFP4_MOE_TRY(exchange->agree(loaded, std::max(parallel.load_timeout, exchange->timeout())));
  NVFP4_MOE_TRY(combine->reserve());
  layer->set_combine(std::move(combine));
  return layer;
}

Result<std::unique_ptr<MoeLayer>> open_layer(const MoeConfig& config, const LayerSource& source,
                                             const LayerOptions& options,
                                             const std::optional<Parallel>& parallel,
                                             const ProgressFn& progress) {
  if (!parallel) return MoeLayer::open(config, source, options, progress);
  Exchange& exchange = *parallel->exchange;
  std::string forced;
  DeviceFacts device;
  const auto choose = [&]() -> Result<BackendSelection> {
    NVFP4_MOE_ASSIGN(const Env env, read_env());
    NVFP4_MOE_ASSIGN(forced, forced_backend(options.backend, env));
    NVFP4_MOE_ASSIGN(device, device_facts(options.device));
    return choose_backend_to_open(config, device, forced, env);
  };
  const Result<BackendSelection> selected = choose();
  NVFP4_MOE_TRY(exchange.agree(selected.status()));
  NVFP4_MOE_ASSIGN(const BackendSelection of_all,
                   backend_of_all(*selected, config, device, forced, exchange));
  NVFP4_MOE_ASSIGN(auto layer, open_over_ranks_on(*of_all.backend, config, source, options,
                                                  *parallel, progress));
  layer->set_self_check(of_all.check);
  return layer;
}

Result<std::unique_ptr<MoeLayer>> open_layer(const Checkpoint& checkpoint, int64_t layer,
                                             const std::optional<MoeOptions>& given,
                                             const IntermediateSlice& slice,
                                             const LayerOptions& options, const CacheOptions& cache,
                                             const std::optional<Parallel>& parallel,
                                             const ProgressFn& progress) {
  if (!parallel)
    return open_checkpoint_layer(checkpoint, layer, given, slice, options, cache, progress);
  std::optional<MoeConfig> config;
  LayerSource source;
  const auto prepare = [&]() -> Status {
    NVFP4_MOE_ASSIGN(config, checkpoint_config(checkpoint, layer, given, {}, options));
    NVFP4_MOE_ASSIGN(source,
                     validated_source(checkpoint, layer, (*config)->shared_intermediate_size > 0));
    return {};
  };
  NVFP4_MOE_TRY(parallel->exchange->agree(prepare()));
  return open_layer(*config, source, options, parallel, progress);
}

}  // namespace nvfp4_moe::internal
