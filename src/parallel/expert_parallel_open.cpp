// Opening a layer over ranks: whatever one of them cannot do, all of them hear of.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "io/json.h"
#include "moe/config_json.h"
#include "moe/env.h"
#include "moe/packed_cache.h"
#include "moe/registry.h"
#include "moe/weights_id.h"
#include "parallel/device_dispatch.h"
#include "parallel/device_reduce.h"
#include "parallel/dispatch.h"
#include "parallel/expert_parallel.h"
#include "parallel/peer_dispatch.h"

namespace nvfp4_moe {
namespace {

// What must be alike on all ranks: every field of the config, and what runs make of it.
Exchange::Facts facts_of(const Backend& backend, const MoeConfig& config, const LayerSource& source,
                         const ExpertParallelOptions& options, const Placement& placement, const LayerOptions& layer,
                         const Exchange& exchange) {
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
  facts.emplace_back("over", exchange.device_link() != nullptr ? exchange.device_link()->describe() : "host");
  return facts;
}

Result<Placement> placement_of(const MoeConfig& config, const ExpertParallelOptions& parallel, int world) {
  if (!parallel.placement) return Placement::contiguous(config->num_experts, world);
  if (parallel.placement->num_experts() == config->num_experts && parallel.placement->world() == world)
    return *parallel.placement;
  return invalid_argument("placement: expected one of " + std::to_string(config->num_experts) + " experts on " +
                          std::to_string(world) + " ranks, got one of " +
                          std::to_string(parallel.placement->num_experts()) + " experts on " +
                          std::to_string(parallel.placement->world()));
}

Status check_options(const LayerOptions& options, const ExpertParallelOptions& parallel, const Exchange& exchange) {
  NVFP4_MOE_TRY(check_named(parallel.combine));
  if (parallel.capacity < 0)
    return invalid_argument("capacity: expected 0 or more, got " + std::to_string(parallel.capacity));
  if (parallel.capacity > options.limits.max_tokens)
    return invalid_argument("capacity: expected at most max_tokens, " + std::to_string(options.limits.max_tokens) +
                            ", got " + std::to_string(parallel.capacity));
  if (parallel.capacity > 0 && parallel.combine == CombineBy::kAllReduce)
    return invalid_argument("capacity: expected 0 with all_reduce, which sends no tokens, got " +
                            std::to_string(parallel.capacity));
  if (options.device != "cpu" && exchange.device_link() == nullptr)
    return unsupported("device: expected cpu for a layer over an exchange without NCCL or peers, got " +
                       options.device);
  if (options.range.first != 0 || options.range.count != 0)
    return invalid_argument("expert range: expected none beside an exchange, which a placement divides, got first " +
                            std::to_string(options.range.first) + " count " + std::to_string(options.range.count));
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  if (parallel.combine == CombineBy::kAllToAll && (env.check || !env.dump_directory.empty()))
    return unsupported("NVFP4_MOE_CHECK, NVFP4_MOE_DUMP: expected neither with all_to_all, whose runs they do not see");
  return {};
}

// The slots of one rank as a layer of its own.
struct RankLayer {
  MoeConfig config;
  LayerSource source;
  LayerOptions options;

  static Result<RankLayer> make(const MoeConfig& whole, const LayerSource& source, const LayerOptions& options,
                                const ExpertParallelOptions& parallel, const Placement& placement, int rank,
                                int64_t most_to_rank) {
    MoeOptions slots = whole.options();
    slots.num_experts = placement.slots();
    // The sum over the ranks has the shared expert once.
    if (parallel.combine == CombineBy::kAllReduce && rank != 0) slots.shared_intermediate_size = 0;
    NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(slots));
    RankLayer result{config, source, options};
    result.source.expert = [&source, &placement](int64_t slot) -> Result<LoadedExpert> {
      const int64_t expert = placement.expert_of(slot);
      auto loaded = source.expert(expert);
      if (!loaded.ok() && expert != slot)
        return loaded.status().in("expert " + std::to_string(expert) + " of the layer");
      return loaded;
    };
    result.options.range = {placement.first_slot(rank), placement.slots_of_rank(rank)};
    if (parallel.combine == CombineBy::kAllToAll) {
      int64_t& tokens = result.options.limits.max_tokens;
      if (__builtin_mul_overflow(most_to_rank, placement.world(), &tokens))
        tokens = std::numeric_limits<int64_t>::max();
    }
    return result;
  }
};

// What is packed is validated first, expert by expert: a rank reads the experts of its slots and no others.
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

}  // namespace

Result<std::unique_ptr<ExpertParallelLayer>> ExpertParallelLayer::open(
    const MoeConfig& config, const LayerSource& source, const LayerOptions& options,
    const ExpertParallelOptions& parallel, std::shared_ptr<Exchange> exchange, const ProgressFn& progress) {
  if (exchange == nullptr) return invalid_argument("exchange: expected one, got null");
  const auto choose = [&]() -> Result<const Backend*> {
    NVFP4_MOE_ASSIGN(const Env env, read_env());
    NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(options.backend, env));
    NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
    return choose_backend(config, device, forced);
  };
  const Result<const Backend*> backend = choose();
  NVFP4_MOE_TRY(exchange->agree(backend.status()));
  return open_on(**backend, config, source, options, parallel, std::move(exchange), progress);
}

Result<std::unique_ptr<ExpertParallelLayer>> ExpertParallelLayer::open_on(
    const Backend& backend, const MoeConfig& config, const LayerSource& source, const LayerOptions& options,
    const ExpertParallelOptions& parallel, std::shared_ptr<Exchange> exchange, const ProgressFn& progress) {
  if (exchange == nullptr) return invalid_argument("exchange: expected one, got null");
  const int rank = exchange->rank(), world = exchange->world();
  const Result<Placement> placement = placement_of(config, parallel, world);
  NVFP4_MOE_TRY(exchange->agree(placement.ok() ? check_options(options, parallel, *exchange) : placement.status()));
  NVFP4_MOE_TRY(
      exchange->check_same("config", facts_of(backend, config, source, parallel, *placement, options, *exchange)));

  std::unique_ptr<ExpertParallelLayer> layer(
      new ExpertParallelLayer(config, *placement, parallel, exchange, options.limits.max_tokens));
  layer->weights_ = source.weights;
  const bool all_to_all = parallel.combine == CombineBy::kAllToAll;
  PeerMemory* const peers = options.device == "cpu" ? nullptr : exchange->peers();
  const int64_t max_tokens = options.limits.max_tokens;
  const int64_t capacity = parallel.capacity > 0 && peers == nullptr ? parallel.capacity : max_tokens;
  std::unique_ptr<PeerDispatch> peer_dispatch;
  const auto load = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const RankLayer mine,
                     RankLayer::make(config, source, options, parallel, *placement, rank, capacity));
    NVFP4_MOE_ASSIGN(layer->layer_, MoeLayer::open_on(backend, mine.config, mine.source, mine.options, progress));
    if (backend.memory == nullptr)
      return backend.steps != nullptr
                 ? Status()
                 : unsupported(std::string("backend: expected one that is made of steps, got ") + backend.name);
    if (device_ranks(layer->layer_->plan().device.kind) == nullptr || options.device == "cpu")
      return unsupported(std::string("backend: expected one of the host's, got ") + backend.name);
    NVFP4_MOE_ASSIGN(layer->device_slots_, DeviceSlots::make(*layer->layer_, config->num_experts));
    NVFP4_MOE_TRY(layer->device_slots_->set_placement(*placement));
    if (all_to_all && peers != nullptr) {
      NVFP4_MOE_ASSIGN(peer_dispatch,
                       PeerDispatch::make(*layer->layer_, *layer->device_slots_, rank, world, max_tokens));
    } else if (all_to_all) {
      NVFP4_MOE_ASSIGN(layer->device_dispatch_, DeviceDispatch::make(*layer->layer_, *layer->device_slots_, rank, world,
                                                                     capacity, parallel.capacity > 0));
    } else {
      layer->device_reduce_ = std::make_unique<DeviceReduce>(*layer->layer_, *layer->device_slots_, world);
    }
    return {};
  };
  Status loaded;
  try {
    loaded = load();
  } catch (...) {  // the other ranks wait: a rank that is out of memory tells them first
    loaded = caught_exception();
  }
  NVFP4_MOE_TRY(exchange->agree(loaded, std::max(parallel.load_timeout, exchange->timeout())));
  if (peers != nullptr)
    NVFP4_MOE_TRY(all_to_all ? peer_dispatch->connect(*peers) : layer->device_reduce_->connect(*peers, max_tokens));
  if (peer_dispatch) layer->device_dispatch_ = std::move(peer_dispatch);
  if (all_to_all) {
    if (!layer->device_dispatch_)
      layer->dispatch_ = std::make_unique<Dispatch>(*layer->layer_, world, capacity, parallel.capacity > 0);
  } else {
    layer->announcement_ = std::make_unique<Announcement>(world, 1);
  }
  return layer;
}

Result<std::unique_ptr<ExpertParallelLayer>> ExpertParallelLayer::open_checkpoint(
    const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& given, const LayerOptions& options,
    const ExpertParallelOptions& parallel, std::shared_ptr<Exchange> exchange, const ProgressFn& progress) {
  if (exchange == nullptr) return invalid_argument("exchange: expected one, got null");
  struct Opened {
    MoeConfig config;
    LayerSource source;
  };
  const auto prepare = [&]() -> Result<Opened> {
    NVFP4_MOE_ASSIGN(const MoeConfig config, checkpoint_config(checkpoint, layer, given, {}, options));
    NVFP4_MOE_ASSIGN(const LayerSource source,
                     validated_source(checkpoint, layer, config->shared_intermediate_size > 0));
    return Opened{config, source};
  };
  const Result<Opened> opened = prepare();
  NVFP4_MOE_TRY(exchange->agree(opened.status()));
  return open(opened->config, opened->source, options, parallel, std::move(exchange), progress);
}

Status ExpertParallelLayer::rearrange_checkpoint(std::vector<int64_t> expert_of_slot, const Checkpoint& checkpoint,
                                                 int64_t layer) {
  struct Prepared {
    Placement placement;
    LayerSource source;
  };
  const auto prepare = [&]() -> Result<Prepared> {
    NVFP4_MOE_ASSIGN(Placement placement,
                     Placement::of_map(config_->num_experts, exchange_->world(), std::move(expert_of_slot)));
    NVFP4_MOE_ASSIGN(LayerSource source, validated_source(checkpoint, layer, false));
    return Prepared{std::move(placement), std::move(source)};
  };
  const Result<Prepared> prepared = prepare();
  NVFP4_MOE_TRY(exchange_->agree(prepared.status()));
  return rearrange(prepared->placement, prepared->source);
}

std::string ExpertParallelLayer::describe_json() const {
  Json json = Json::parse(layer_->describe_json());
  json["num_experts"] = config_->num_experts;
  json["shared_intermediate_size"] = config_->shared_intermediate_size;
  json["max_tokens"] = max_tokens_;
  json["workspace_bytes"] = workspace_bytes();
  const Status polls = exchange_->can_poll();
  json["expert_parallel"] = {{"rank", exchange_->rank()},
                             {"world", exchange_->world()},
                             {"over", device_slots_ ? exchange_->device_link()->describe() : "host"},
                             {"ends", polls.ok() ? "polled" : "reported by calls: " + polls.message()},
                             {"combine", to_string(options_.combine)},
                             {"capacity", options_.capacity},
                             {"placement", placement_.to_string()}};
  return json.dump();
}

}  // namespace nvfp4_moe
