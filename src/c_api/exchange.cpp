// The C interface: exchanges over a host's functions and over threads, and the exchange part of a
// layer's options.
#include <algorithm>

#include "c_api/layer.h"
#include "exchange/callback.h"
#include "exchange/threads.h"
#include "parallel/balance.h"
#include "parallel/connect.h"

struct nvfp4_moe_thread_group {
  std::shared_ptr<nvfp4_moe::internal::ThreadGroup> group;
};

namespace nvfp4_moe::internal::c_api {

namespace {

Result<Timeout> read_timeout(int64_t timeout_ms) {
  if (timeout_ms < 0)
    return invalid_argument("timeout_ms: expected 0 or more, got " + std::to_string(timeout_ms));
  return timeout_ms == 0 ? kExchangeTimeout : Timeout{timeout_ms};
}

}  // namespace

Result<RankCombine*> ranks_in(const nvfp4_moe_layer* layer) {
  NVFP4_MOE_TRY(check_pointer("layer", layer));
  if (layer->layer->combine() != nullptr) return &ranks_of(*layer->layer);
  return unsupported(
      "layer: expected one over an exchange, got one of one rank; open it with expert_parallel");
}

Status check_slots(const RankCombine& ranks, const int64_t* expert_of_slot, int64_t slots) {
  NVFP4_MOE_TRY(check_pointer("expert_of_slot", expert_of_slot));
  const int64_t expected = ranks.placement().slots();
  if (slots == expected) return {};
  return invalid_argument("slots: expected " + std::to_string(expected) + ", got " +
                          std::to_string(slots));
}

Exchange* exchange_of(const nvfp4_moe_layer_options& options) {
  if (options.expert_parallel == nullptr) return nullptr;
  const auto parallel = read_struct("expert_parallel", options.expert_parallel);
  return parallel.ok() && parallel->exchange != nullptr ? parallel->exchange->exchange.get()
                                                        : nullptr;
}

Result<std::optional<Parallel>> read_parallel(const nvfp4_moe_layer_options& options,
                                              int64_t num_experts) {
  if (options.expert_parallel == nullptr) return std::optional<Parallel>();
  NVFP4_MOE_ASSIGN(const nvfp4_moe_expert_parallel given,
                   read_struct("expert_parallel", options.expert_parallel));
  NVFP4_MOE_TRY(check_pointer("expert_parallel.exchange", given.exchange));
  NVFP4_MOE_TRY(check_zero("expert_parallel.reserved", given.reserved));
  if (options.cache_directory != nullptr || options.slice_first != 0 || options.slice_count != 0)
    return invalid_argument(
        "options: expected neither cache_directory nor a slice beside expert_parallel, got one");
  Parallel parallel{given.exchange->exchange, {}};
  NVFP4_MOE_ASSIGN(parallel.options.combine,
                   read_enum("expert_parallel.combine", given.combine, CombineBy::kAllReduce));
  parallel.options.capacity = given.capacity;
  if (given.expert_of_slot == nullptr) {
    NVFP4_MOE_TRY(check_zero("expert_parallel.slots", given.slots));
    return std::optional<Parallel>(std::move(parallel));
  }
  const int world = parallel.exchange->world();
  if (given.slots < 1 || given.slots / world > num_experts)  // checked before that many are read
    return invalid_argument("expert_parallel.slots: expected 1 to " + std::to_string(world) +
                            " times " + std::to_string(num_experts) + ", got " +
                            std::to_string(given.slots));
  NVFP4_MOE_ASSIGN(parallel.options.placement,
                   Placement::of_map(num_experts, world,
                                     {given.expert_of_slot, given.expert_of_slot + given.slots}));
  return std::optional<Parallel>(std::move(parallel));
}

}  // namespace nvfp4_moe::internal::c_api

using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace moe = nvfp4_moe::internal;

extern "C" {

nvfp4_moe_status nvfp4_moe_exchange_connect(const nvfp4_moe_exchange_callbacks* callbacks,
                                            int32_t rank, int32_t world, int64_t timeout_ms,
                                            nvfp4_moe_exchange** exchange) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("exchange", exchange));
    *exchange = nullptr;
    NVFP4_MOE_ASSIGN(const nvfp4_moe_exchange_callbacks given,
                     api::read_struct("callbacks", callbacks));
    NVFP4_MOE_ASSIGN(const moe::Timeout timeout, api::read_timeout(timeout_ms));
    auto handle = std::make_unique<nvfp4_moe_exchange>();
    NVFP4_MOE_ASSIGN(handle->exchange,
                     moe::connect_callbacks({given.user, given.all_to_all_v, given.abort}, rank,
                                            world, timeout));
    *exchange = handle.release();
    return {};
  });
}

nvfp4_moe_status nvfp4_moe_thread_group_create(int32_t world, nvfp4_moe_thread_group** group) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("group", group));
    *group = nullptr;
    auto handle = std::make_unique<nvfp4_moe_thread_group>();
    NVFP4_MOE_ASSIGN(handle->group, moe::ThreadGroup::make(world));
    *group = handle.release();
    return {};
  });
}

void nvfp4_moe_thread_group_close(nvfp4_moe_thread_group* group) { delete group; }

nvfp4_moe_status nvfp4_moe_thread_group_join(nvfp4_moe_thread_group* group, int32_t rank,
                                             int32_t world, int64_t timeout_ms,
                                             nvfp4_moe_exchange** exchange) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("exchange", exchange));
    *exchange = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("group", group));
    NVFP4_MOE_ASSIGN(const moe::Timeout timeout, api::read_timeout(timeout_ms));
    auto handle = std::make_unique<nvfp4_moe_exchange>();
    const std::shared_ptr<moe::ThreadGroup> shared = group->group;  // another rank may close it
    NVFP4_MOE_ASSIGN(handle->exchange, shared->join(rank, world, timeout));
    *exchange = handle.release();
    return {};
  });
}

nvfp4_moe_status nvfp4_moe_exchange_use_nccl(nvfp4_moe_exchange* exchange, const char* device,
                                             const char* library, void* communicator) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("exchange", exchange));
    if (const Status there = api::check_pointer("device", device); !there.ok())
      return exchange->exchange->agree(there);
    return moe::use_nccl(*exchange->exchange, device, library == nullptr ? "" : library,
                         communicator);
  });
}

nvfp4_moe_status nvfp4_moe_exchange_use_peers(nvfp4_moe_exchange* exchange, const char* device) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("exchange", exchange));
    if (const Status there = api::check_pointer("device", device); !there.ok())
      return exchange->exchange->agree(there);
    return moe::use_peers(*exchange->exchange, device);
  });
}

nvfp4_moe_status nvfp4_moe_layer_expert_load(const nvfp4_moe_layer* layer, uint64_t* load,
                                             int64_t num_experts) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(moe::RankCombine* const ranks, api::ranks_in(layer));
    moe::Status mine = api::check_pointer("load", load);
    const int64_t expected = ranks->config()->num_experts;
    if (mine.ok() && num_experts != expected)
      mine = moe::invalid_argument("num_experts: expected " + std::to_string(expected) + ", got " +
                                   std::to_string(num_experts));
    NVFP4_MOE_ASSIGN(const std::vector<uint64_t> counts, ranks->expert_load(mine));
    std::copy(counts.begin(), counts.end(), load);
    return {};
  });
}

nvfp4_moe_status nvfp4_moe_layer_reset_expert_load(const nvfp4_moe_layer* layer) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(moe::RankCombine* const ranks, api::ranks_in(layer));
    return ranks->reset_expert_load();
  });
}

nvfp4_moe_status nvfp4_moe_propose_placement(const uint64_t* load, int64_t num_experts,
                                             int32_t world, int64_t slots_per_rank,
                                             int64_t* expert_of_slot) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("load", load));
    NVFP4_MOE_TRY(api::check_pointer("expert_of_slot", expert_of_slot));
    if (num_experts < 1)
      return moe::invalid_argument("num_experts: expected 1 or more, got " +
                                   std::to_string(num_experts));
    NVFP4_MOE_ASSIGN(
        const moe::Placement placement,
        moe::propose_placement({load, static_cast<size_t>(num_experts)}, world, slots_per_rank));
    std::copy(placement.expert_of_slot().begin(), placement.expert_of_slot().end(), expert_of_slot);
    return {};
  });
}

nvfp4_moe_status nvfp4_moe_layer_rearrange(nvfp4_moe_layer* layer, const int64_t* expert_of_slot,
                                           int64_t slots, const nvfp4_moe_checkpoint* checkpoint,
                                           int64_t layer_index) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(moe::RankCombine* const ranks, api::ranks_in(layer));
    const auto check = [&]() -> Status {
      NVFP4_MOE_TRY(api::check_slots(*ranks, expert_of_slot, slots));
      return api::check_pointer("checkpoint", checkpoint);
    };
    if (const Status mine = check(); !mine.ok()) return ranks->exchange().agree(mine);
    return ranks->rearrange_checkpoint({expert_of_slot, expert_of_slot + slots},
                                       checkpoint->checkpoint, layer_index);
  });
}

void nvfp4_moe_exchange_close(nvfp4_moe_exchange* exchange) { delete exchange; }

}  // extern "C"
