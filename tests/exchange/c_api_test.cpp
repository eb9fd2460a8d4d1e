// Expert parallel through the C and C++ interfaces: exchanges, layers over them, and refusals.

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exchange/ranks.h"
#include "moe/c_layer.h"
#include "support/checkpoint_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

struct CRank {
  CLayer c;
  nvfp4_moe_expert_parallel parallel = nvfp4_moe::make<nvfp4_moe_expert_parallel>();

  explicit CRank(const nvfp4_moe::Exchange& exchange) {
    parallel.exchange = exchange.get();
    c.options.expert_parallel = &parallel;
  }
};

// Calls body(rank, exchange) on a thread for each rank.
void on_c_ranks(int world,
                const std::function<void(int, std::optional<nvfp4_moe::Exchange>&)>& body) {
  const nvfp4_moe::ThreadGroup group(world);
  on_threads(world, [&](int rank) {
    std::optional<nvfp4_moe::Exchange> exchange(std::in_place, group.get(), rank, world);
    body(rank, exchange);
  });
}

TEST(CExpertParallel, GivesTheBitsOfOneRank) {
  constexpr int kWorld = 2;
  TinyBatch whole(tiny_options(), 10);
  const std::vector<float> expected = CLayer().expected(whole);
  const std::vector<int64_t> map{0, 2, 3, 1, 3, 0};
  for (const bool redundant : {false, true}) {
    std::vector<std::vector<float>> outs(kWorld);
    on_c_ranks(kWorld, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
      CRank mine(*exchange);
      mine.parallel.expert_of_slot = redundant ? map.data() : nullptr;
      mine.parallel.slots = redundant ? 6 : 0;
      const nvfp4_moe::Layer layer = mine.c.open();
      exchange.reset();  // the layer keeps what it needs
      TinyBatch batch(tiny_options(), 10);
      auto part = c_batch(batch);
      part.tokens = rank == 0 ? 7 : 3;
      const int64_t first = rank == 0 ? 0 : 7;
      part.hidden = batch.hidden.data() + first * 64;
      part.topk_ids = batch.ids.data() + first * 2;
      part.topk_weights = batch.weights.data() + first * 2;
      const nvfp4_moe::Workspace workspace(layer.workspace_bytes(part.tokens));
      layer.run(part, workspace);
      outs[static_cast<size_t>(rank)].assign(batch.out.begin(),
                                             batch.out.begin() + part.tokens * 64);
      EXPECT_EQ(layer.status(workspace).bad_expert_ids, 0u);
      EXPECT_GT(layer.status(workspace).hidden_blocks, 0u);
      EXPECT_THAT(layer.describe(), HasSubstr(redundant ? "\"placement\":\"0,2,3|1,3,0\""
                                                        : "\"placement\":\"0,1|2,3\""));
      EXPECT_THAT(layer.describe(), HasSubstr("\"num_experts\":4,"));
      layer.run(part, workspace);  // closing a rank here would end the other's first run
    });
    outs[0].insert(outs[0].end(), outs[1].begin(), outs[1].end());
    EXPECT_TRUE(same_bits(outs[0], expected));
  }
}

TEST(CExpertParallel, AllReduceGivesAllRanksTheSame) {
  std::vector<std::vector<float>> outs(4);
  on_c_ranks(4, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
    CRank mine(*exchange);
    mine.parallel.combine = NVFP4_MOE_COMBINE_ALL_REDUCE;
    const nvfp4_moe::Layer layer = mine.c.open();
    TinyBatch batch(tiny_options(), 5);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(5));
    layer.run(c_batch(batch), workspace);
    outs[static_cast<size_t>(rank)] = batch.out;
  });
  for (const auto& out : outs) EXPECT_TRUE(same_bits(out, outs[0]));
  TinyBatch batch(tiny_options(), 5);
  const std::vector<float> expected = CLayer().expected(batch);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(outs[0][i], expected[i], 1e-5f * std::abs(expected[i]) + 1e-5f);
}

TEST(CExpertParallel, WeightsOfASlotAreReplacedAndUnpackedWhereTheyAre) {
  on_c_ranks(2, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
    CRank mine(*exchange);
    nvfp4_moe::Layer layer = mine.c.open();
    const Expert& other = mine.c.tiny.experts[0];
    layer.replace_expert(1, CLayer::expert(other));  // of both ranks: experts 1 and 3
    std::vector<uint8_t> codes(other.gate.codes.size());
    auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
    out.gate_codes = codes.data();
    layer.unpack_expert(1, out);
    EXPECT_EQ(codes, other.gate.codes);
    layer.unpack_expert(0, out);
    EXPECT_EQ(codes, mine.c.tiny.experts[static_cast<size_t>(2 * rank)].gate.codes);
    TinyBatch batch(tiny_options(), 3);
    const auto c = c_batch(batch);
    EXPECT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &c, 0, "/tmp/unused"),
              NVFP4_MOE_STATUS_UNSUPPORTED);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("repro"));
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(3));
    layer.run(c, workspace);  // also waits for the other rank's failures above
  });
}

TEST(CExpertParallel, WhatOneRankGetsWrongReachesAll) {
  const int64_t map[] = {0, 1, 2, 9};
  const struct {
    const char* text;
    std::function<void(CRank&)> change;
  } wrongs[] = {
      {"rank 1: expert_parallel.combine: expected 0 to 1, got 2",
       [](CRank& r) { r.parallel.combine = 2; }},
      {"rank 1: expert_parallel.reserved", [](CRank& r) { r.parallel.reserved = 1; }},
      {"rank 1: expert_parallel.slots", [](CRank& r) { r.parallel.slots = 4; }},
      {"rank 1: expert_parallel.slots", [&](CRank& r) { r.parallel.expert_of_slot = map; }},
      {"rank 1: expert_parallel.slots",
       [&](CRank& r) { r.parallel.expert_of_slot = map, r.parallel.slots = INT64_MAX; }},
      {"rank 1: placement: slot 3",
       [&](CRank& r) { r.parallel.expert_of_slot = map, r.parallel.slots = 4; }},
      {"rank 1: capacity", [](CRank& r) { r.parallel.capacity = -1; }},
      {"rank 1: options: expected neither", [](CRank& r) { r.c.options.cache_directory = "/tmp"; }},
      {"rank 1: expert range", [](CRank& r) { r.c.options.expert_count = 2; }},
      {"rank 1: top_k", [](CRank& r) { r.c.config.top_k = 0; }},
      {"config of rank 1: expected top_k 2 as on rank 0, got 1",
       [](CRank& r) { r.c.config.top_k = 1; }},
      {"rank 1: gate_codes: expected a pointer",
       [](CRank& r) { r.c.tensors.gate_codes = nullptr; }},
      {"rank 1: expert 3: down block scale", [](CRank& r) { r.c.arrays[5].back() = 0xFF; }},
  };
  for (const auto& wrong : wrongs) {
    on_c_ranks(2, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
      CRank mine(*exchange);
      if (rank == 1) wrong.change(mine);
      EXPECT_NE(mine.c.try_open(), NVFP4_MOE_STATUS_OK);
      EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(wrong.text));
      CRank again(*exchange);  // a failure that all ranks know of breaks nothing
      EXPECT_EQ(again.c.try_open(), NVFP4_MOE_STATUS_OK) << nvfp4_moe_last_error();
    });
  }
}

TEST(CExpertParallel, WhatOneRankGetsWrongInACallReachesAll) {
  on_c_ranks(2, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
    CRank mine(*exchange);
    const nvfp4_moe::Layer layer = mine.c.open();
    TinyBatch batch(tiny_options(), 3);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(3));
    nvfp4_moe_batch wrong = c_batch(batch);
    wrong.reserved = 1;
    const nvfp4_moe_batch right = c_batch(batch);
    const nvfp4_moe_batch* const wrongs[] = {nullptr, &wrong};
    for (const nvfp4_moe_batch* const of_rank_1 : wrongs) {
      EXPECT_EQ(nvfp4_moe_layer_run(layer.get(), rank == 1 ? of_rank_1 : &right, workspace.data(),
                                    workspace.size_bytes(), nullptr),
                NVFP4_MOE_STATUS_INVALID_ARGUMENT);
      EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 1: batch"));
    }
    uint64_t load[4];
    EXPECT_EQ(nvfp4_moe_layer_expert_load(layer.get(), load, rank == 1 ? 5 : 4),
              NVFP4_MOE_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 1: num_experts: expected 4, got 5"));
    EXPECT_EQ(nvfp4_moe_layer_expert_load(layer.get(), rank == 1 ? nullptr : load, 4),
              NVFP4_MOE_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 1: load: expected a pointer"));
    layer.run(right, workspace);  // and the exchange continues
    EXPECT_EQ(nvfp4_moe_layer_expert_load(layer.get(), load, 4), NVFP4_MOE_STATUS_OK);
  });
}

int32_t unreachable(void* user, const void*, const int64_t*, void*, const int64_t*,
                    int64_t timeout_ms, char* error, size_t error_bytes) {
  *static_cast<int64_t*>(user) = timeout_ms;
  std::strncpy(error, "rank 7 is down", error_bytes);
  return 1;
}

TEST(CExchange, ArgumentsAndFailuresOfTheHost) {
  nvfp4_moe_exchange* exchange = reinterpret_cast<nvfp4_moe_exchange*>(1);
  auto callbacks = nvfp4_moe::make<nvfp4_moe_exchange_callbacks>();
  const auto refused = [&](const char* text) {
    EXPECT_EQ(exchange, nullptr);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(text));
    exchange = reinterpret_cast<nvfp4_moe_exchange*>(1);
  };
  EXPECT_EQ(nvfp4_moe_exchange_connect(&callbacks, 0, 2, 0, &exchange),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  refused("all_to_all_v");
  int64_t timeout_ms = 0;
  callbacks.user = &timeout_ms;
  callbacks.all_to_all_v = unreachable;
  EXPECT_EQ(nvfp4_moe_exchange_connect(&callbacks, 0, 2, 0, &exchange), NVFP4_MOE_STATUS_IO);
  refused("handshake: rank 7 is down");
  EXPECT_EQ(timeout_ms, 30000);
  EXPECT_EQ(nvfp4_moe_exchange_connect(&callbacks, 0, 2, 50, &exchange), NVFP4_MOE_STATUS_IO);
  refused("rank 7 is down");
  EXPECT_EQ(timeout_ms, 50);
  EXPECT_EQ(nvfp4_moe_exchange_connect(&callbacks, 2, 2, 0, &exchange),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  refused("rank: expected 0 to 1");
  EXPECT_EQ(nvfp4_moe_exchange_connect(&callbacks, 0, 2, -1, &exchange),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  refused("timeout_ms");
  EXPECT_EQ(nvfp4_moe_exchange_connect(nullptr, 0, 2, 0, &exchange),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  refused("callbacks");
  EXPECT_EQ(nvfp4_moe_thread_group_join(nullptr, 0, 2, 0, &exchange),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  refused("group");
  nvfp4_moe_thread_group* group = reinterpret_cast<nvfp4_moe_thread_group*>(1);
  EXPECT_EQ(nvfp4_moe_thread_group_create(0, &group), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(group, nullptr);
  nvfp4_moe_thread_group_close(nullptr);
  nvfp4_moe_exchange_close(nullptr);
}

// A checkpoint, and a layer of it.
struct TinyCheckpoint {
  static constexpr int64_t kLayer = 1;
  const TempDir folder;
  const std::string path = [this] {
    EXPECT_OK(CheckpointBuilder({.model_type = "deepseek_v3"}).write(folder.path().string()));
    return folder.path().string();
  }();
  const nvfp4_moe::Checkpoint checkpoint{path};
  nvfp4_moe_layer_options options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  MoeOptions sizes;

  TinyCheckpoint() {
    options.max_tokens = 16;
    options.threads = 1;
    const auto config = checkpoint.config(kLayer);
    sizes.num_experts = config.num_experts;
    sizes.top_k = config.top_k;
    sizes.hidden_size = config.hidden_size;
  }
};

// A checkpoint over ranks: each rank reads only the experts of its slots and the shared one.
TEST(CExpertParallel, OfACheckpointGivesTheBitsOfOneRank) {
  const TinyCheckpoint tiny;
  const nvfp4_moe::Checkpoint& checkpoint = tiny.checkpoint;
  const MoeOptions& sizes = tiny.sizes;
  TinyBatch whole(sizes, 8);
  const nvfp4_moe::Layer one(checkpoint, tiny.kLayer, tiny.options);
  const nvfp4_moe::Workspace one_workspace(one.workspace_bytes(8));
  one.run(c_batch(whole), one_workspace);

  std::vector<float> outs(whole.out.size());
  on_c_ranks(2, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
    auto parallel = nvfp4_moe::make<nvfp4_moe_expert_parallel>();
    parallel.exchange = exchange->get();
    auto mine = tiny.options;
    mine.expert_parallel = &parallel;
    const nvfp4_moe::Layer layer(checkpoint, tiny.kLayer, mine);
    TinyBatch batch(sizes, 8);
    auto part = c_batch(batch);
    part.tokens = 4;
    part.hidden = batch.hidden.data() + rank * 4 * sizes.hidden_size;
    part.topk_ids = batch.ids.data() + rank * 4 * sizes.top_k;
    part.topk_weights = batch.weights.data() + rank * 4 * sizes.top_k;
    part.out = outs.data() + rank * 4 * sizes.hidden_size;
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(4));
    layer.run(part, workspace);

    mine.slice_count = 16;
    nvfp4_moe_layer* none = nullptr;
    EXPECT_NE(nvfp4_moe_layer_open_checkpoint(checkpoint.get(), tiny.kLayer, nullptr, &mine, &none),
              NVFP4_MOE_STATUS_OK);
    EXPECT_THAT(nvfp4_moe_last_error(),
                HasSubstr("rank 0: options: expected neither cache_directory nor a slice"));
  });
  EXPECT_TRUE(same_bits(outs, whole.out));
}

// A balancer's steps: counts, a proposal, and other experts in the ranks' slots, replaced in place.
TEST(CExpertParallel, ALoadsProposalIsTakenInPlace) {
  const TinyCheckpoint tiny;
  const nvfp4_moe::Checkpoint& checkpoint = tiny.checkpoint;
  const MoeOptions& sizes = tiny.sizes;
  std::vector<int64_t> backwards;
  for (int64_t expert = sizes.num_experts; expert-- > 0;) backwards.push_back(expert);
  on_c_ranks(2, [&](int rank, std::optional<nvfp4_moe::Exchange>& exchange) {
    auto parallel = nvfp4_moe::make<nvfp4_moe_expert_parallel>();
    parallel.exchange = exchange->get();
    auto mine = tiny.options;
    mine.expert_parallel = &parallel;
    nvfp4_moe::Layer layer(checkpoint, 1, mine);
    TinyBatch batch(sizes, 4);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(4));
    layer.run(c_batch(batch), workspace);
    const std::vector<float> before = batch.out;
    const std::vector<uint64_t> load = layer.expert_load(sizes.num_experts);
    std::vector<uint64_t> expected(load.size());
    for (const int32_t id : batch.ids)
      if (id >= 0 && id < sizes.num_experts)
        expected[static_cast<size_t>(id)] += 2;  // both ranks have the batch
    EXPECT_EQ(load, expected);
    layer.reset_expert_load();
    EXPECT_EQ(layer.expert_load(sizes.num_experts), std::vector<uint64_t>(load.size()));

    const std::vector<int64_t> proposed =
        nvfp4_moe::propose_placement(load, 2, sizes.num_experts / 2);
    for (const std::vector<int64_t>& placement : {proposed, backwards}) {
      layer.rearrange(placement, checkpoint, 1);
      layer.run(c_batch(batch), workspace);
      EXPECT_TRUE(same_bits(batch.out, before));
    }
    std::string text;
    for (size_t i = 0; i < backwards.size(); ++i)
      text += (i == 0 ? "" : i == backwards.size() / 2 ? "|" : ",") + std::to_string(backwards[i]);
    EXPECT_THAT(layer.describe(), HasSubstr("\"placement\":\"" + text + "\""));

    // Every rank reports one rank's mistake, and the layer is unchanged.
    auto* const handle = const_cast<nvfp4_moe_layer*>(layer.get());
    const auto slots = static_cast<int64_t>(backwards.size());
    const auto refused = [&](const nvfp4_moe_status code, const char* message) {
      EXPECT_NE(code, NVFP4_MOE_STATUS_OK);
      EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(message));
    };
    const bool wrong = rank == 1;
    refused(nvfp4_moe_layer_rearrange(handle, wrong ? nullptr : backwards.data(), slots,
                                      checkpoint.get(), 1),
            "rank 1: expert_of_slot");
    refused(
        nvfp4_moe_layer_rearrange(handle, backwards.data(), wrong ? 3 : slots, checkpoint.get(), 1),
        "rank 1: slots: expected");
    refused(nvfp4_moe_layer_rearrange(handle, backwards.data(), slots, checkpoint.get(),
                                      wrong ? 99 : 1),
            "rank 1: ");
    std::vector<int64_t> twice = backwards;
    if (wrong) twice[0] = twice[1];
    refused(nvfp4_moe_layer_rearrange(handle, twice.data(), slots, checkpoint.get(), 1),
            "rank 1: placement");
    layer.run(c_batch(batch), workspace);
    EXPECT_TRUE(same_bits(batch.out, before));
  });
}

TEST(CExpertParallel, LayersOfOneRankHaveNoLoadAndNoPlacement) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  uint64_t load[4] = {};
  int64_t slots[4] = {};
  EXPECT_EQ(nvfp4_moe_layer_expert_load(layer.get(), load, 4), NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("expected one over an exchange"));
  EXPECT_EQ(nvfp4_moe_layer_reset_expert_load(layer.get()), NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_EQ(nvfp4_moe_layer_expert_load(nullptr, load, 4), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_rearrange(nullptr, slots, 4, nullptr, 0),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_propose_placement(nullptr, 4, 2, 2, slots),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_propose_placement(load, 0, 2, 2, slots), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_propose_placement(load, 4, 2, 1, slots), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_propose_placement(load, 4, 0, 1, slots), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
}

TEST(CExchange, DevicesThatAreNoneAreRefusedByName) {
  nvfp4_moe_thread_group* group = nullptr;
  ASSERT_EQ(nvfp4_moe_thread_group_create(1, &group), NVFP4_MOE_STATUS_OK);
  nvfp4_moe::Exchange alone(group, 0, 1);
  nvfp4_moe_thread_group_close(group);
  EXPECT_EQ(nvfp4_moe_exchange_use_nccl(alone.get(), nullptr, nullptr, nullptr),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 0: device"));
  EXPECT_EQ(nvfp4_moe_exchange_use_nccl(alone.get(), "cpu", nullptr, nullptr),
            NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 0: nccl: expected a device cuda:N, got cpu"));
  EXPECT_EQ(nvfp4_moe_exchange_use_peers(alone.get(), nullptr), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 0: device"));
  EXPECT_EQ(nvfp4_moe_exchange_use_peers(alone.get(), "cpu"), NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_THAT(nvfp4_moe_last_error(),
              HasSubstr("rank 0: peers: expected a device cuda:N, got cpu"));
  EXPECT_EQ(nvfp4_moe_exchange_use_peers(nullptr, "cpu"), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
