// The C interface: exchanges over a host's functions and over threads, and what a layer's options say of one.
#include "c_api/layer.h"
#include "exchange/callback.h"
#include "exchange/threads.h"

struct nvfp4_moe_thread_group {
  std::shared_ptr<nvfp4_moe::ThreadGroup> group;
};

namespace nvfp4_moe::c_api {

namespace {

Result<Timeout> read_timeout(int64_t timeout_ms) {
  if (timeout_ms < 0) return invalid_argument("timeout_ms: expected 0 or more, got " + std::to_string(timeout_ms));
  return timeout_ms == 0 ? kExchangeTimeout : Timeout{timeout_ms};
}

}  // namespace

Exchange* exchange_of(const nvfp4_moe_layer_options& options) {
  if (options.expert_parallel == nullptr) return nullptr;
  const auto parallel = read_struct("expert_parallel", options.expert_parallel);
  return parallel.ok() && parallel->exchange != nullptr ? parallel->exchange->exchange.get() : nullptr;
}

Result<std::optional<Parallel>> read_parallel(const nvfp4_moe_layer_options& options, int64_t num_experts) {
  if (options.expert_parallel == nullptr) return std::optional<Parallel>();
  NVFP4_MOE_ASSIGN(const nvfp4_moe_expert_parallel given, read_struct("expert_parallel", options.expert_parallel));
  NVFP4_MOE_TRY(check_pointer("expert_parallel.exchange", given.exchange));
  NVFP4_MOE_TRY(check_zero("expert_parallel.reserved", given.reserved));
  if (options.cache_directory != nullptr || options.slice_first != 0 || options.slice_count != 0)
    return invalid_argument("options: expected neither cache_directory nor a slice beside expert_parallel, got one");
  Parallel parallel{given.exchange->exchange, {}};
  NVFP4_MOE_ASSIGN(parallel.options.combine,
                   read_enum("expert_parallel.combine", given.combine, CombineBy::kAllReduce));
  parallel.options.capacity = given.capacity;
  if (given.expert_of_slot == nullptr) {
    NVFP4_MOE_TRY(check_zero("expert_parallel.slots", given.slots));
    return std::optional<Parallel>(std::move(parallel));
  }
  const int world = parallel.exchange->world();
  if (given.slots < 1 || given.slots / world > num_experts)  // before so many are read
    return invalid_argument("expert_parallel.slots: expected 1 to " + std::to_string(world) + " times " +
                            std::to_string(num_experts) + ", got " + std::to_string(given.slots));
  NVFP4_MOE_ASSIGN(parallel.options.placement,
                   Placement::of_map(num_experts, world, {given.expert_of_slot, given.expert_of_slot + given.slots}));
  return std::optional<Parallel>(std::move(parallel));
}

}  // namespace nvfp4_moe::c_api

using nvfp4_moe::Status;
namespace api = nvfp4_moe::c_api;

extern "C" {

nvfp4_moe_code nvfp4_moe_exchange_connect(const nvfp4_moe_exchange_callbacks* callbacks, int32_t rank, int32_t world,
                                          int64_t timeout_ms, nvfp4_moe_exchange** exchange) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("exchange", exchange));
    *exchange = nullptr;
    NVFP4_MOE_ASSIGN(const nvfp4_moe_exchange_callbacks given, api::read_struct("callbacks", callbacks));
    NVFP4_MOE_ASSIGN(const nvfp4_moe::Timeout timeout, api::read_timeout(timeout_ms));
    auto handle = std::make_unique<nvfp4_moe_exchange>();
    NVFP4_MOE_ASSIGN(handle->exchange,
                     nvfp4_moe::connect_callbacks({given.user, given.all_to_all_v, given.abort}, rank, world, timeout));
    *exchange = handle.release();
    return {};
  });
}

nvfp4_moe_code nvfp4_moe_thread_group_create(int32_t world, nvfp4_moe_thread_group** group) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("group", group));
    *group = nullptr;
    auto handle = std::make_unique<nvfp4_moe_thread_group>();
    NVFP4_MOE_ASSIGN(handle->group, nvfp4_moe::ThreadGroup::make(world));
    *group = handle.release();
    return {};
  });
}

void nvfp4_moe_thread_group_close(nvfp4_moe_thread_group* group) { delete group; }

nvfp4_moe_code nvfp4_moe_thread_group_join(nvfp4_moe_thread_group* group, int32_t rank, int32_t world,
                                           int64_t timeout_ms, nvfp4_moe_exchange** exchange) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("exchange", exchange));
    *exchange = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("group", group));
    NVFP4_MOE_ASSIGN(const nvfp4_moe::Timeout timeout, api::read_timeout(timeout_ms));
    auto handle = std::make_unique<nvfp4_moe_exchange>();
    const std::shared_ptr<nvfp4_moe::ThreadGroup> meeting = group->group;  // which another rank may close
    NVFP4_MOE_ASSIGN(handle->exchange, meeting->join(rank, world, timeout));
    *exchange = handle.release();
    return {};
  });
}

void nvfp4_moe_exchange_close(nvfp4_moe_exchange* exchange) { delete exchange; }

}  // extern "C"
