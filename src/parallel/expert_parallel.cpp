// What both ways to combine share: checks, ids to slots, the announcement of a run; and the sum of all_reduce.
#include "parallel/expert_parallel.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>

#include "core/float_formats.h"
#include "exchange/nccl.h"
#include "moe/batch_check.h"
#include "moe/registry.h"
#include "moe/workspace_claim.h"
#include "parallel/device_all_to_all.h"
#include "parallel/device_reduce.h"
#include "parallel/dispatch.h"
#include "parallel/peer_device.h"

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

Result<std::shared_ptr<const FailureWord>> make_failure_word(const DeviceRanks& ranks, int device) {
  uint32_t *word = nullptr, *on_device = nullptr;
  NVFP4_MOE_TRY(ranks.make_host_word(device, &word, &on_device));
  // When it is dropped the layers have gone, and by the freeing of their memory whatever reads it has ended.
  return std::shared_ptr<const FailureWord>(new FailureWord{word, on_device},
                                            [&ranks, device](const FailureWord* dropped) {
                                              ranks.drop_host_word(device, dropped->word);
                                              delete dropped;
                                            });
}

}  // namespace

const char* to_string(CombineBy value) { return name_of(value); }

Status use_nccl(Exchange& exchange, const std::string& device, const std::string& library, void* communicator) {
  struct Call {
    Exchange& exchange;
    NcclOptions options;
  } call{exchange, {library, communicator, {}, {}, {}}};
  const auto find = [&]() -> Result<DeviceFacts> {
    if (exchange.device() != nullptr) return invalid_argument("nccl: expected an exchange without it, got one with it");
    if (exchange.peers() != nullptr)
      return invalid_argument("nccl: expected an exchange without peers, got one with them");
    NVFP4_MOE_ASSIGN(DeviceFacts facts, device_facts(device));
    if (device_ranks(facts.kind) == nullptr) return unsupported("nccl: expected a device cuda:N, got " + device);
    return facts;
  };
  const Result<DeviceFacts> facts = find();
  NVFP4_MOE_TRY(exchange.agree(facts.status()));
  const DeviceRanks& ranks = *device_ranks(facts->kind);
  const int index = facts->index;
  call.options.marks = {[&ranks, index](void** mark, void* stream) { return ranks.set_mark(index, mark, stream); },
                        [&ranks, index](void* mark) { return ranks.mark_reached(index, mark); },
                        [&ranks, index](void* mark) { ranks.drop_mark(index, mark); }};
  call.options.on_device = [&ranks, index](const std::function<void()>& body) {
    const auto run = [](void* argument) -> Status {
      (*static_cast<const std::function<void()>*>(argument))();
      return {};
    };
    if (!ranks.on_device(index, run, const_cast<std::function<void()>*>(&body)).ok()) body();  // it ends all the same
  };
  const auto word = make_failure_word(ranks, index);
  NVFP4_MOE_TRY(exchange.agree(word.status()));
  call.options.failure_word = *word;
  const auto connect = [](void* argument) -> Status {
    auto& on = *static_cast<Call*>(argument);
    NVFP4_MOE_ASSIGN(auto transport, connect_nccl(on.exchange, on.options));
    on.exchange.set_device(std::move(transport));
    return {};
  };
  return ranks.on_device(index, connect, &call);
}

Status use_peers(Exchange& exchange, const std::string& device) {
  const auto find = [&]() -> Result<DeviceFacts> {
    if (exchange.device_link() != nullptr)
      return invalid_argument("peers: expected an exchange without devices, got one with " +
                              exchange.device_link()->describe());
    NVFP4_MOE_ASSIGN(DeviceFacts facts, device_facts(device));
    if (device_peers(facts.kind) == nullptr) return unsupported("peers: expected a device cuda:N, got " + device);
    return facts;
  };
  const Result<DeviceFacts> facts = find();
  NVFP4_MOE_TRY(exchange.agree(facts.status()));
  NVFP4_MOE_ASSIGN(auto peers, connect_peers(exchange, make_peer_device(*facts)));
  exchange.set_peers(std::move(peers));
  return {};
}

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

size_t ExpertParallelLayer::workspace_bytes(int64_t tokens) const {
  if (device_dispatch_) return device_dispatch_->workspace_bytes(tokens);
  if (device_reduce_) return device_reduce_->workspace_bytes(tokens);
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
  // All ranks of kAllReduce see the same tokens and so choose alike; those of kAllToAll begin at different slots.
  const int64_t home = dispatch_ ? exchange_->rank() : 0, top_k = config_->top_k;
  for (int64_t at = 0; at < batch.tokens * top_k; ++at) {
    const int64_t id = id_at(batch, at);
    if (id < 0 || id >= config_->num_experts) {
      slots[at] = id == -1 ? -1 : -2;
      continue;
    }
    slots[at] = static_cast<int32_t>(placement_.slot_of(id, turn_of(home, at / top_k, at % top_k)));
    load_[static_cast<size_t>(id)].fetch_add(1, std::memory_order_relaxed);
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

Status ExpertParallelLayer::run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream) const {
  const InUse call(in_use_);
  NVFP4_MOE_TRY(call.status());
  const bool on_device = device_slots_ != nullptr;
  if (on_device) NVFP4_MOE_TRY(exchange_->device_link()->state());
  Status mine = check_batch(batch, workspace, workspace_bytes);
  // A device's stream orders the runs in a workspace.
  const WorkspaceClaim claim(mine.ok() && !on_device ? workspace : nullptr);
  if (!claim) mine = WorkspaceClaim::busy();
  const WeightUses::Use in_use = layer_->use();
  if (!in_use) mine = Status(Code::kBusy, "run: the layer's weights are being replaced");
  if (mine.ok()) mine = layer_->note_capture(stream);

  auto* const bytes = static_cast<std::byte*>(workspace);
  if (dispatch_) {
    int32_t* const slots = mine.ok() ? dispatch_->slots(bytes) : nullptr;
    if (mine.ok()) translate(batch, slots);
    NVFP4_MOE_TRY(dispatch_->announce(*exchange_, placement_, batch.tokens, slots, mine));
  } else if (device_dispatch_) {
    NVFP4_MOE_TRY(device_dispatch_->begin(*exchange_, batch, bytes, stream, mine));
  } else {
    Announcement& announcement = *announcement_;
    std::array<int64_t, 1> captured{};
    if (on_device && mine.ok()) {
      const Result<uint64_t> capture = layer_->backend().memory->capture_id(stream);
      mine = capture.status();
      captured[0] = capture.ok() && *capture != 0 ? 1 : 0;
    }
    NVFP4_MOE_TRY(announcement.gather(*exchange_, batch.tokens, mine, captured));
    NVFP4_MOE_TRY(all_capture_or_none(announcement, exchange_->world(), 0));
    for (int rank = 1; rank < exchange_->world(); ++rank)
      if (announcement.tokens(rank) != announcement.tokens(0))
        return invalid_argument("tokens of rank " + std::to_string(rank) + ": expected " +
                                std::to_string(announcement.tokens(0)) + " as on rank 0, got " +
                                std::to_string(announcement.tokens(rank)));
    if (!on_device) translate(batch, ReduceSpans(*layer_, batch.tokens, bytes).slots);
  }
  const Status status = dispatch_          ? dispatch_->run(*exchange_, placement_, batch, bytes)
                        : device_dispatch_ ? device_dispatch_->run(*exchange_, batch, bytes, stream)
                        : device_reduce_   ? device_reduce_->run(*exchange_, batch, bytes, stream)
                                           : run_all_reduce(batch, workspace);
  if (status.ok()) return status;
  exchange_->abort(status);  // the others are past the point where a rank may say no
  if (on_device) exchange_->device_link()->abort(status);
  return status;
}

Status ExpertParallelLayer::decline(const Status& why) const {
  const InUse call(in_use_);
  NVFP4_MOE_TRY(call.status());
  if (dispatch_) return dispatch_->announce(*exchange_, placement_, 0, nullptr, why);
  if (device_dispatch_) return device_dispatch_->begin(*exchange_, {}, nullptr, nullptr, why);
  return announcement_->gather(*exchange_, 0, why, std::array<int64_t, 1>{});
}

Result<RunStatus> ExpertParallelLayer::status(const void* workspace, size_t workspace_bytes, void* stream) const {
  NVFP4_MOE_TRY(failure(stream));
  const Result<RunStatus> status = layer_->status(workspace, workspace_bytes, stream);  // all layouts begin with it
  if (device_slots_) NVFP4_MOE_TRY(exchange_->device_link()->state_of_work());          // what this has waited for
  return status;
}

Status ExpertParallelLayer::failure(void* stream) const {
  if (!device_slots_) return {};
  NVFP4_MOE_TRY(exchange_->device_link()->state_of_work());
  return device_dispatch_ ? device_dispatch_->report(stream) : Status();
}

Result<std::vector<uint64_t>> ExpertParallelLayer::load() const {
  if (device_slots_) return device_slots_->load();
  std::vector<uint64_t> counts(static_cast<size_t>(config_->num_experts));
  for (size_t expert = 0; expert < counts.size(); ++expert)
    counts[expert] = load_[expert].load(std::memory_order_relaxed);
  return counts;
}

Status ExpertParallelLayer::reset_load() const {
  if (device_slots_) return device_slots_->reset_load();
  for (int64_t expert = 0; expert < config_->num_experts; ++expert)
    load_[static_cast<size_t>(expert)].store(0, std::memory_order_relaxed);
  return {};
}

Result<std::vector<uint64_t>> ExpertParallelLayer::gather_load(const Status& mine) const {
  Result<std::vector<uint64_t>> counts = mine.ok() ? load() : mine;
  if (options_.combine == CombineBy::kAllReduce) return counts;
  NVFP4_MOE_TRY(exchange_->agree(counts.status()));
  std::vector<uint64_t> all(counts->size() * static_cast<size_t>(exchange_->world()));
  NVFP4_MOE_TRY(
      exchange_->all_gather(counts->data(), static_cast<int64_t>(counts->size() * sizeof(uint64_t)), all.data()));
  for (size_t expert = 0; expert < counts->size(); ++expert) {
    (*counts)[expert] = 0;
    for (size_t at = expert; at < all.size(); at += counts->size()) (*counts)[expert] += all[at];
  }
  return counts;
}

Status ExpertParallelLayer::replace_expert(int64_t local_expert, const ExpertSource& source) {
  return layer_->replace_expert(local_expert, source);
}

Status ExpertParallelLayer::replace_expert_on_stream(int64_t local_expert, const ExpertSource& source, void* stream) {
  return layer_->replace_expert_on_stream(local_expert, source, stream);
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
    if (!weights_.empty() && !source.weights.empty() && source.weights != weights_)
      return invalid_argument("weights: expected those that the layer was opened with, of hash " + weights_ +
                              ", got those of " + source.name + ", of hash " + source.weights);
    return {};
  };
  NVFP4_MOE_TRY(exchange_->agree(check()));
  NVFP4_MOE_TRY(exchange_->check_same("rearrange", {{"placement", placement.to_string()}}));
  const auto replace = [&]() -> Status {
    const ExpertRange& range = layer_->weights().range;
    for (int64_t local = 0; local < range.count; ++local) {
      const int64_t slot = range.global(local), expert = placement.expert_of(slot);
      if (expert == placement_.expert_of(slot)) continue;
      const auto loaded = source.expert(expert);
      const Status replaced = loaded.ok() ? layer_->replace_expert_at_rest(local, loaded->source) : loaded.status();
      if (!replaced.ok()) return replaced.in("slot " + std::to_string(slot) + ", expert " + std::to_string(expert));
    }
    return device_slots_ ? device_slots_->set_placement(placement) : Status();
  };
  Status replaced;
  try {
    replaced = replace();
  } catch (...) {  // a rank that is out of memory tells them too
    replaced = caught_exception();
  }
  const Status all = exchange_->agree(replaced, std::max(options_.load_timeout, exchange_->timeout()));
  if (!all.ok()) {
    exchange_->abort_agreed(all);
    return all;
  }
  placement_ = placement;
  return {};
}

}  // namespace nvfp4_moe
