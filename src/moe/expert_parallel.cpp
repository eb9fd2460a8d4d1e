// Opening over the ranks, and what both ways to combine share: checks, ids to slots, the announcement of a run.
#include "moe/expert_parallel.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "core/float_formats.h"
#include "moe/batch_check.h"
#include "moe/config_json.h"
#include "moe/dispatch.h"
#include "moe/env.h"
#include "moe/registry.h"
#include "moe/workspace_claim.h"
#include "safetensors/json.h"

namespace nvfp4_moe {
namespace {

int64_t id_at(const Batch& batch, int64_t assignment) {
  return batch.ids_dtype == DType::kI64 ? static_cast<const int64_t*>(batch.topk_ids)[assignment]
                                        : static_cast<const int32_t*>(batch.topk_ids)[assignment];
}

// One of a rank's calls at a time: a second one would meet other ranks' first.
class InUse {
 public:
  explicit InUse(std::atomic<bool>& flag) : flag_(flag), granted_(!flag.exchange(true)) {}
  ~InUse() {
    if (granted_) flag_.store(false);
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
  Status status() const {
    if (granted_) return {};
    return {Code::kBusy, "expert parallel layer: expected one call at a time, got a second one"};
  }

 private:
  std::atomic<bool>& flag_;
  const bool granted_;
};

// What must be alike on all ranks: every field of the config, and what runs make of it.
Exchange::Facts facts_of(const MoeConfig& config, const LayerScales& scales, const ExpertParallelOptions& options,
                         const Placement& placement, int64_t max_tokens) {
  Exchange::Facts facts;
  const Json json = Json::parse(to_json(config.options()));
  for (const auto& [name, value] : json.items()) facts.emplace_back(name, value.dump());
  const auto scale = [](const std::optional<float>& value) {
    return value ? std::to_string(std::bit_cast<uint32_t>(*value)) : std::string("none");
  };
  facts.emplace_back("hidden input_scale (bits)", scale(scales.hidden));
  facts.emplace_back("intermediate input_scale (bits)", scale(scales.intermediate));
  facts.emplace_back("combine", to_string(options.combine));
  facts.emplace_back("capacity", std::to_string(options.capacity));
  facts.emplace_back("placement", placement.to_string());
  facts.emplace_back("max_tokens", std::to_string(max_tokens));
  return facts;
}

// values: (count) of fp32 -> out, each rounded once. How many are NaN or Inf as stored.
uint64_t store(const float* values, int64_t count, DType dtype, void* out) {
  uint64_t nonfinite = 0;
  const uint32_t overflow = overflow_bits(dtype);
  for (int64_t i = 0; i < count; ++i) {
    nonfinite += (std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFu) >= overflow;
    if (dtype == DType::kF32)
      static_cast<float*>(out)[i] = values[i];
    else
      static_cast<uint16_t*>(out)[i] = dtype == DType::kBf16 ? bf16_from_float(values[i]) : fp16_from_float(values[i]);
  }
  return nonfinite;
}

// The arrays of a run by all-reduce.
struct ReduceSpans {
  RunStatus* status;
  int32_t* slots;    // (T, k)
  float* partial;    // (T, H) what this rank's experts add, then the sum
  std::byte* inner;  // this rank's run
  size_t inner_bytes, size_bytes;

  ReduceSpans(const MoeLayer& layer, int64_t tokens, std::byte* workspace) {
    Arena arena(workspace, layer.plan().limits.guard_bytes);
    status = arena.take<RunStatus>("", "status", 1);
    slots = arena.take<int32_t>("", "slots", tokens * layer.config()->top_k);
    partial = arena.take<float>("", "partial", tokens * layer.config()->hidden_size);
    inner_bytes = layer.workspace_bytes(tokens);
    inner = arena.take<std::byte>("", "inner", static_cast<int64_t>(inner_bytes));
    size_bytes = arena.size_bytes();
  }
};

}  // namespace

const char* to_string(CombineBy value) { return name_of(value); }

ExpertParallelLayer::ExpertParallelLayer(const MoeConfig& config, Placement placement,
                                         const ExpertParallelOptions& options, std::shared_ptr<Exchange> exchange,
                                         int64_t max_tokens)
    : config_(config),
      placement_(std::move(placement)),
      options_(options),
      exchange_(std::move(exchange)),
      max_tokens_(max_tokens),
      load_(new std::atomic<uint64_t>[static_cast<size_t>(config->num_experts)]()) {}

ExpertParallelLayer::~ExpertParallelLayer() = default;

bool ExpertParallelLayer::has_shared() const { return layer_->config()->shared_intermediate_size > 0; }

namespace {

Result<Placement> placement_of(const MoeConfig& config, const ExpertParallelOptions& parallel, int world) {
  if (!parallel.placement) return Placement::contiguous(config->num_experts, world);
  if (parallel.placement->num_experts() == config->num_experts && parallel.placement->world() == world)
    return *parallel.placement;
  return invalid_argument("placement: expected one of " + std::to_string(config->num_experts) + " experts on " +
                          std::to_string(world) + " ranks, got one of " +
                          std::to_string(parallel.placement->num_experts()) + " experts on " +
                          std::to_string(parallel.placement->world()));
}

Status check_options(const LayerOptions& options, const ExpertParallelOptions& parallel) {
  NVFP4_MOE_TRY(check_named(parallel.combine));
  if (parallel.capacity < 0)
    return invalid_argument("capacity: expected 0 or more, got " + std::to_string(parallel.capacity));
  if (parallel.capacity > options.limits.max_tokens)
    return invalid_argument("capacity: expected at most max_tokens, " + std::to_string(options.limits.max_tokens) +
                            ", got " + std::to_string(parallel.capacity));
  if (parallel.capacity > 0 && parallel.combine == CombineBy::kAllReduce)
    return invalid_argument("capacity: expected 0 with all_reduce, which sends no tokens, got " +
                            std::to_string(parallel.capacity));
  if (options.device != "cpu")
    return unsupported("device: expected cpu for a layer over an exchange, got " + options.device);
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
                                const ExpertParallelOptions& parallel, const Placement& placement, int rank) {
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
      const int64_t most = parallel.capacity > 0 ? parallel.capacity : options.limits.max_tokens;
      int64_t& tokens = result.options.limits.max_tokens;
      if (__builtin_mul_overflow(most, placement.world(), &tokens)) tokens = std::numeric_limits<int64_t>::max();
    }
    return result;
  }
};

}  // namespace

Result<std::unique_ptr<ExpertParallelLayer>> ExpertParallelLayer::open(
    const MoeConfig& config, const LayerSource& source, const LayerOptions& options,
    const ExpertParallelOptions& parallel, std::shared_ptr<Exchange> exchange, const ProgressFn& progress) {
  if (exchange == nullptr) return invalid_argument("exchange: expected one, got null");
  const auto choose = [&]() -> Result<const Backend*> {
    NVFP4_MOE_ASSIGN(const Env env, read_env());
    const std::string& forced = options.backend == "auto" && !env.backend.empty() ? env.backend : options.backend;
    return choose_backend(config, host_facts(), forced);
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
  NVFP4_MOE_TRY(exchange->agree(placement.ok() ? check_options(options, parallel) : placement.status()));
  NVFP4_MOE_TRY(
      exchange->check_same("config", facts_of(config, source.scales, parallel, *placement, options.limits.max_tokens)));

  std::unique_ptr<ExpertParallelLayer> layer(
      new ExpertParallelLayer(config, *placement, parallel, exchange, options.limits.max_tokens));
  const auto load = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const RankLayer mine, RankLayer::make(config, source, options, parallel, *placement, rank));
    NVFP4_MOE_ASSIGN(layer->layer_, MoeLayer::open_on(backend, mine.config, mine.source, mine.options, progress));
    if (layer->layer_->backend().memory != nullptr || layer->layer_->backend().steps == nullptr)
      return unsupported(std::string("backend: expected one of the host's, made of steps, got ") + backend.name);
    return {};
  };
  Status loaded;
  try {
    loaded = load();
  } catch (...) {  // the other ranks wait: a rank that is out of memory tells them first
    loaded = caught_exception();
  }
  NVFP4_MOE_TRY(exchange->agree(loaded, std::max(parallel.load_timeout, exchange->timeout())));
  if (parallel.combine == CombineBy::kAllToAll) {
    const int64_t most = parallel.capacity > 0 ? parallel.capacity : options.limits.max_tokens;
    layer->dispatch_ = std::make_unique<Dispatch>(*layer->layer_, world, most, parallel.capacity > 0);
  } else {
    layer->announcement_ = std::make_unique<Announcement>(world, 0);
  }
  return layer;
}

size_t ExpertParallelLayer::workspace_bytes(int64_t tokens) const {
  return dispatch_ ? dispatch_->workspace_bytes(tokens) : ReduceSpans(*layer_, tokens, nullptr).size_bytes;
}

Status ExpertParallelLayer::check_batch(const Batch& batch, const void* workspace, size_t workspace_bytes) const {
  NVFP4_MOE_TRY(check_tokens(batch.tokens, max_tokens_));
  if (batch.selection != nullptr)
    return unsupported("selection: expected experts that are selected before a run over an exchange, got logits");
  if (batch.shared_weights != nullptr && config_->shared_intermediate_size == 0)
    return invalid_argument("shared_weights: expected null (the layer has no shared expert), got a pointer");
  Batch mine = batch;
  if (!has_shared()) mine.shared_weights = nullptr;
  NVFP4_MOE_TRY(layer_->check_batch(mine, workspace, workspace_bytes));
  return check_workspace(workspace, workspace_bytes, this->workspace_bytes(batch.tokens));
}

void ExpertParallelLayer::translate(const Batch& batch, int32_t* slots) const {
  // All ranks of kAllReduce see the same tokens and so choose alike; those of kAllToAll begin at different replicas.
  const int64_t turn = dispatch_ ? exchange_->rank() : 0;
  for (int64_t token = 0; token < batch.tokens; ++token) {
    for (int64_t at = token * config_->top_k; at < (token + 1) * config_->top_k; ++at) {
      const int64_t id = id_at(batch, at);
      const bool legal = id >= 0 && id < config_->num_experts;
      slots[at] = legal ? static_cast<int32_t>(placement_.slot_of(id, token + turn)) : id == -1 ? -1 : -2;
      if (legal) load_[static_cast<size_t>(id)].fetch_add(1, std::memory_order_relaxed);
    }
  }
}

Status ExpertParallelLayer::run_all_reduce(const Batch& batch, void* workspace) const {
  const ReduceSpans spans(*layer_, batch.tokens, static_cast<std::byte*>(workspace));
  Batch mine = batch;
  mine.topk_ids = spans.slots;
  mine.ids_dtype = DType::kI32;
  if (!has_shared()) mine.shared_weights = nullptr;
  mine.out = spans.partial;
  mine.out_dtype = DType::kF32;
  NVFP4_MOE_TRY(layer_->run(mine, spans.inner, spans.inner_bytes));
  const int64_t values = batch.tokens * config_->hidden_size;
  NVFP4_MOE_TRY(exchange_->all_reduce(spans.partial, values, DType::kF32));
  NVFP4_MOE_ASSIGN(*spans.status, layer_->status(spans.inner, spans.inner_bytes));
  spans.status->nonfinite_outputs = store(spans.partial, values, batch.out_dtype, batch.out);
  return {};
}

Status ExpertParallelLayer::run(const Batch& batch, void* workspace, size_t workspace_bytes) const {
  const InUse call(in_use_);
  NVFP4_MOE_TRY(call.status());
  Status mine = check_batch(batch, workspace, workspace_bytes);
  const WorkspaceClaim claim(mine.ok() ? workspace : nullptr);
  if (!claim) mine = WorkspaceClaim::busy();
  const WeightUses::Use in_use = layer_->use();
  if (!in_use) mine = Status(Code::kBusy, "run: the layer's weights are being replaced");

  auto* const bytes = static_cast<std::byte*>(workspace);
  if (dispatch_) {
    int32_t* const slots = mine.ok() ? dispatch_->slots(bytes) : nullptr;
    if (mine.ok()) translate(batch, slots);
    NVFP4_MOE_TRY(dispatch_->announce(*exchange_, placement_, batch.tokens, slots, mine));
  } else {
    Announcement& announcement = *announcement_;
    NVFP4_MOE_TRY(announcement.gather(*exchange_, batch.tokens, mine, {}));
    for (int rank = 1; rank < exchange_->world(); ++rank)
      if (announcement.tokens(rank) != announcement.tokens(0))
        return invalid_argument("tokens of rank " + std::to_string(rank) + ": expected " +
                                std::to_string(announcement.tokens(0)) + " as on rank 0, got " +
                                std::to_string(announcement.tokens(rank)));
    translate(batch, ReduceSpans(*layer_, batch.tokens, bytes).slots);
  }
  const Status status =
      dispatch_ ? dispatch_->run(*exchange_, placement_, batch, bytes) : run_all_reduce(batch, workspace);
  if (!status.ok()) exchange_->abort(status);  // the others are past the point where a rank may say no
  return status;
}

Result<RunStatus> ExpertParallelLayer::status(const void* workspace, size_t workspace_bytes) const {
  NVFP4_MOE_TRY(check_workspace(workspace, workspace_bytes, sizeof(RunStatus)));
  return *static_cast<const RunStatus*>(workspace);  // both layouts begin with it
}

std::vector<uint64_t> ExpertParallelLayer::load() const {
  std::vector<uint64_t> counts(static_cast<size_t>(config_->num_experts));
  for (size_t expert = 0; expert < counts.size(); ++expert)
    counts[expert] = load_[expert].load(std::memory_order_relaxed);
  return counts;
}

void ExpertParallelLayer::reset_load() const {
  for (int64_t expert = 0; expert < config_->num_experts; ++expert)
    load_[static_cast<size_t>(expert)].store(0, std::memory_order_relaxed);
}

Result<std::vector<uint64_t>> ExpertParallelLayer::gather_load() const {
  std::vector<uint64_t> mine = load();
  if (!dispatch_) return mine;
  std::vector<uint64_t> all(mine.size() * static_cast<size_t>(exchange_->world()));
  NVFP4_MOE_TRY(exchange_->all_gather(mine.data(), static_cast<int64_t>(mine.size() * sizeof(uint64_t)), all.data()));
  for (size_t expert = 0; expert < mine.size(); ++expert) {
    mine[expert] = 0;
    for (size_t at = expert; at < all.size(); at += mine.size()) mine[expert] += all[at];
  }
  return mine;
}

Status ExpertParallelLayer::rearrange(const Placement& placement, const LayerSource& source) {
  const InUse call(in_use_);
  NVFP4_MOE_TRY(call.status());
  const auto check = [&]() -> Status {
    if (placement.num_experts() != config_->num_experts || placement.world() != exchange_->world())
      return invalid_argument("placement: expected one of " + std::to_string(config_->num_experts) + " experts on " +
                              std::to_string(exchange_->world()) + " ranks");
    for (int rank = 0; rank < placement.world(); ++rank)
      if (placement.slots_of_rank(rank) != placement_.slots_of_rank(rank))
        return invalid_argument("placement: expected " + std::to_string(placement_.slots_of_rank(rank)) +
                                " slots on rank " + std::to_string(rank) + ", got " +
                                std::to_string(placement.slots_of_rank(rank)));
    return {};
  };
  NVFP4_MOE_TRY(exchange_->agree(check()));
  NVFP4_MOE_TRY(exchange_->check_same("rearrange", {{"placement", placement.to_string()}}));
  const ExpertRange& range = layer_->weights().range;
  Status replaced;
  for (int64_t local = 0; local < range.count && replaced.ok(); ++local) {
    const int64_t slot = range.global(local), expert = placement.expert_of(slot);
    if (expert == placement_.expert_of(slot)) continue;
    const auto loaded = source.expert(expert);
    replaced = loaded.ok() ? layer_->replace_expert(local, loaded->source) : loaded.status();
    if (!replaced.ok()) replaced = replaced.in("slot " + std::to_string(slot) + ", expert " + std::to_string(expert));
  }
  const Status all = exchange_->agree(replaced, std::max(options_.load_timeout, exchange_->timeout()));
  if (!all.ok()) {
    exchange_->abort(all);
    return all;
  }
  placement_ = placement;
  return {};
}

}  // namespace nvfp4_moe
