// Expert parallel through the C and C++ interfaces: exchanges, layers over them, other experts in
// their slots, and refusals.

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
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

// Calls body(rank, exchange) on a thread for each of two ranks.
void on_c_ranks(const std::function<void(int, nvfp4_moe::Exchange&)>& body) {
  const nvfp4_moe::ThreadGroup group(2);
  on_threads(2, [&](int rank) {
    nvfp4_moe::Exchange exchange(group.get(), rank, 2);
    body(rank, exchange);
  });
}

// Runs this rank's half of the batch, or all of it.
std::vector<float> run_part(const nvfp4_moe::Layer& layer, int rank, const MoeOptions& sizes,
                            int64_t tokens, bool whole = false) {
  TinyBatch batch(sizes, tokens);
  nvfp4_moe_batch part = c_batch(batch);
  const int64_t first = whole || rank == 0 ? 0 : tokens / 2;
  if (!whole) part.tokens = tokens / 2;
  part.hidden = batch.hidden.data() + first * sizes.hidden_size;
  part.topk_ids = batch.ids.data() + first * sizes.top_k;
  part.topk_weights = batch.weights.data() + first * sizes.top_k;
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(part.tokens));
  layer.run(part, workspace);
  EXPECT_EQ(layer.status(workspace).bad_expert_ids, 0u);
  EXPECT_GT(layer.status(workspace).hidden_blocks, 0u);
  layer.run(part, workspace);  // closing a rank here would end the other's first run
  return {batch.out.begin(), batch.out.begin() + part.tokens * sizes.hidden_size};
}

TEST(CExpertParallel, GivesTheBitsOfOneRank) {
  constexpr int64_t kTokens = 10;
  TinyBatch batch(tiny_options(), kTokens);
  const std::vector<float> expected = CLayer().expected(batch);
  const struct {
    std::vector<int64_t> map;  // empty: contiguous
    int32_t combine;
    const char* described;
  } cases[] = {{{}, NVFP4_MOE_COMBINE_ALL_TO_ALL, "\"placement\":\"0,1|2,3\""},
               {{0, 2, 3, 1, 3, 0}, NVFP4_MOE_COMBINE_ALL_TO_ALL, "\"0,2,3|1,3,0\""},
               {{}, NVFP4_MOE_COMBINE_ALL_REDUCE, "\"combine\":\"all_reduce\""}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.described);
    const bool reduce = one.combine == NVFP4_MOE_COMBINE_ALL_REDUCE;
    std::vector<float> outs[2];
    on_c_ranks([&](int rank, nvfp4_moe::Exchange& exchange) {
      CRank mine(exchange);
      mine.parallel.expert_of_slot = one.map.empty() ? nullptr : one.map.data();
      mine.parallel.slots = std::ssize(one.map);
      mine.parallel.combine = one.combine;
      const nvfp4_moe::Layer layer = mine.c.open();
      EXPECT_THAT(layer.describe(),
                  AllOf(HasSubstr(one.described), HasSubstr("\"num_experts\":4,")));
      outs[rank] = run_part(layer, rank, tiny_options(), kTokens, reduce);
    });
    if (!reduce) {
      outs[0].insert(outs[0].end(), outs[1].begin(), outs[1].end());
      EXPECT_TRUE(same_bits(outs[0], expected));
      continue;
    }
    EXPECT_TRUE(same_bits(outs[0], outs[1]));
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(outs[0][i], expected[i], 1e-5f * std::abs(expected[i]) + 1e-5f);
  }
}

// tests/exchange/failures_test.cpp has the mistakes that these structs pass on.
TEST(CExpertParallel, WhatOneRankGetsWrongReachesAll) {
  const int64_t map[] = {0, 1, 2, 9};
  const struct {
    const char* text;
    std::function<void(CRank&)> change;
  } wrongs[] = {
      {"expert_parallel.combine: expected 0 to 1, got 2", [](CRank& r) { r.parallel.combine = 2; }},
      {"expert_parallel.reserved", [](CRank& r) { r.parallel.reserved = 1; }},
      {"expert_parallel.slots", [](CRank& r) { r.parallel.slots = 4; }},
      {"expert_parallel.slots", [&](CRank& r) { r.parallel.expert_of_slot = map; }},
      {"expert_parallel.slots",
       [&](CRank& r) { r.parallel.expert_of_slot = map, r.parallel.slots = INT64_MAX; }},
      {"placement: slot 3",
       [&](CRank& r) { r.parallel.expert_of_slot = map, r.parallel.slots = 4; }},
      {"capacity", [](CRank& r) { r.parallel.capacity = -1; }},
      {"options: expected neither cache_directory nor a slice",
       [](CRank& r) { r.c.options.cache_directory = "/tmp"; }},
      {"expert range", [](CRank& r) { r.c.options.expert_count = 2; }},
      {"top_k", [](CRank& r) { r.c.config.top_k = 0; }},
      {"gate_codes: expected a pointer", [](CRank& r) { r.c.tensors.gate_codes = nullptr; }},
  };
  on_c_ranks([&](int rank, nvfp4_moe::Exchange& exchange) {
    for (const auto& wrong : wrongs) {
      CRank mine(exchange);
      if (rank == 1) wrong.change(mine);
      EXPECT_NE(mine.c.try_open(), NVFP4_MOE_STATUS_OK);
      EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(std::string("rank 1: ") + wrong.text));
    }
    // A failure that all ranks know of breaks nothing.
    CRank again(exchange);
    EXPECT_EQ(again.c.try_open(), NVFP4_MOE_STATUS_OK) << nvfp4_moe_last_error();
  });
}

TEST(CExpertParallel, WhatOneRankGetsWrongInACallReachesAllAndTheRestIsDone) {
  on_c_ranks([&](int rank, nvfp4_moe::Exchange& exchange) {
    CRank mine(exchange);
    nvfp4_moe::Layer layer = mine.c.open();
    nvfp4_moe_layer* const handle = const_cast<nvfp4_moe_layer*>(layer.get());
    const std::vector<float> before = run_part(layer, rank, tiny_options(), 8);
    const auto refused = [](nvfp4_moe_status code, const char* message) {
      EXPECT_EQ(code, kInvalid);
      EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(message));
    };
    const bool wrong = rank == 1;
    TinyBatch batch(tiny_options(), 3);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(3));
    const nvfp4_moe_batch right = c_batch(batch);
    nvfp4_moe_batch reserved = right;
    reserved.reserved = 1;
    for (const nvfp4_moe_batch* const other :
         std::initializer_list<const nvfp4_moe_batch*>{nullptr, &reserved})
      refused(nvfp4_moe_layer_run(handle, wrong ? other : &right, workspace.data(),
                                  workspace.size_bytes(), nullptr),
              "rank 1: batch");

    uint64_t load[4];
    refused(nvfp4_moe_layer_expert_load(handle, load, wrong ? 5 : 4),
            "rank 1: num_experts: expected 4, got 5");
    refused(nvfp4_moe_layer_expert_load(handle, wrong ? nullptr : load, 4),
            "rank 1: load: expected a pointer");

    const nvfp4_moe_layer_tensors& tensors = mine.c.tensors;
    auto without = tensors, narrow = tensors, broken = tensors;
    const float scales[] = {-1, 1, 1, 1};  // of expert 0, which is to go to the last slot
    without.down_codes = nullptr;
    narrow.gate_up_codes_stride = 1;
    broken.down_tensor_scales = scales;
    const int64_t backwards[] = {3, 2, 1, 0}, other[] = {0, 2, 1, 3};
    const auto rearrange = [&](const int64_t* slots, int64_t count,
                               const nvfp4_moe_layer_tensors* from) {
      return wrong ? nvfp4_moe_layer_rearrange_tensors(handle, slots, count, from)
                   : nvfp4_moe_layer_rearrange_tensors(handle, backwards, 4, &tensors);
    };
    refused(rearrange(nullptr, 4, &tensors), "rank 1: expert_of_slot");
    refused(rearrange(backwards, 3, &tensors), "rank 1: slots: expected 4, got 3");
    refused(rearrange(backwards, 4, nullptr), "rank 1: tensors");
    refused(rearrange(backwards, 4, &without), "rank 1: down_codes");
    refused(rearrange(backwards, 4, &narrow), "rank 1: gate_up_codes_stride");
    refused(rearrange(other, 4, &tensors), "rearrange of rank 1: expected placement");
    EXPECT_TRUE(same_bits(run_part(layer, rank, tiny_options(), 8), before));

    EXPECT_EQ(nvfp4_moe_layer_write_repro(handle, &right, 0, "/tmp/unused"),
              NVFP4_MOE_STATUS_UNSUPPORTED);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("repro"));

    // Weights of slots are rearranged, replaced and unpacked in place.
    layer.rearrange({2, 3, 0, 1}, tensors);
    EXPECT_TRUE(same_bits(run_part(layer, rank, tiny_options(), 8), before));
    const std::vector<Expert>& experts = mine.c.tiny.experts;
    layer.replace_expert(1, CLayer::expert(experts[0]));  // on both ranks
    for (const int64_t local : {0, 1}) {
      const Expert& expected = experts[local == 1 ? 0 : rank == 0 ? 2 : 0];
      std::vector<uint8_t> gate(expected.gate.codes.size()), down(expected.down.codes.size());
      auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
      out.gate_codes = gate.data();
      out.down_codes = down.data();
      layer.unpack_expert(local, out);
      EXPECT_EQ(gate, expected.gate.codes);
      EXPECT_EQ(down, expected.down.codes);
    }

    // If an expert is illegal, other ranks have already begun to replace it.
    for (int call = 0; call < 2; ++call) {
      EXPECT_NE(rearrange(backwards, 4, &broken), NVFP4_MOE_STATUS_OK);
      EXPECT_THAT(nvfp4_moe_last_error(), StartsWith("rank 1: slot 3, expert 0"));
    }
  });
}

// Each rank reads only the experts of its slots and the shared one. Then a balancer's steps:
// counts, a proposal, and other experts in the ranks' slots.
TEST(CExpertParallel, OfACheckpointGivesTheBitsOfOneRankWhereverItsExpertsAre) {
  constexpr int64_t kLayer = 1, kTokens = 8;
  const TempDir folder;
  ASSERT_OK(CheckpointBuilder({.model_type = "deepseek_v3"}).write(folder.path().string()));
  const nvfp4_moe::Checkpoint checkpoint{folder.path().string()};
  const nvfp4_moe_config config = checkpoint.config(kLayer);
  const MoeOptions sizes = sizes_of(config.num_experts, config.top_k, config.hidden_size);
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 16;
  options.threads = 1;
  const std::vector<float> expected =
      run_part(nvfp4_moe::Layer(checkpoint, kLayer, options), 0, sizes, kTokens, true);
  std::vector<uint64_t> counts(static_cast<size_t>(config.num_experts));
  for (const int32_t id : TinyBatch(sizes, kTokens).ids)
    if (id >= 0 && id < config.num_experts) counts[static_cast<size_t>(id)] += 2;  // of two runs

  std::vector<float> outs[2];
  on_c_ranks([&](int rank, nvfp4_moe::Exchange& exchange) {
    auto parallel = nvfp4_moe::make<nvfp4_moe_expert_parallel>();
    parallel.exchange = exchange.get();
    auto mine = options;
    mine.expert_parallel = &parallel;
    nvfp4_moe::Layer layer(checkpoint, kLayer, mine);
    outs[rank] = run_part(layer, rank, sizes, kTokens);
    const std::vector<uint64_t> load = layer.expert_load(config.num_experts);
    EXPECT_EQ(load, counts);
    layer.reset_expert_load();
    EXPECT_EQ(layer.expert_load(config.num_experts), std::vector<uint64_t>(load.size()));
    layer.rearrange(nvfp4_moe::propose_placement(load, 2, config.num_experts / 2), checkpoint,
                    kLayer);
    EXPECT_TRUE(same_bits(run_part(layer, rank, sizes, kTokens), outs[rank]));
    std::vector<int64_t> backwards(counts.size());
    for (size_t slot = 0; slot < counts.size(); ++slot)
      backwards[slot] = config.num_experts - 1 - static_cast<int64_t>(slot);
    EXPECT_NE(
        nvfp4_moe_layer_rearrange(const_cast<nvfp4_moe_layer*>(layer.get()), backwards.data(),
                                  config.num_experts, checkpoint.get(), rank == 1 ? 99 : kLayer),
        NVFP4_MOE_STATUS_OK);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 1: "));
    layer.rearrange(backwards, checkpoint, kLayer);
    EXPECT_THAT(layer.describe(),
                HasSubstr("\"placement\":\"" + std::to_string(config.num_experts - 1) + ","));
    EXPECT_TRUE(same_bits(run_part(layer, rank, sizes, kTokens), outs[rank]));
  });
  outs[0].insert(outs[0].end(), outs[1].begin(), outs[1].end());
  EXPECT_TRUE(same_bits(outs[0], expected));
}

TEST(CExpertParallel, LayersOfOneRankHaveNoLoadAndNoPlacement) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  auto* const handle = const_cast<nvfp4_moe_layer*>(layer.get());
  uint64_t load[4] = {};
  const int64_t slots[4] = {0, 1, 2, 3};
  for (const nvfp4_moe_status status :
       {nvfp4_moe_layer_expert_load(handle, load, 4), nvfp4_moe_layer_reset_expert_load(handle),
        nvfp4_moe_layer_rearrange_tensors(handle, slots, 4, &c.tensors)})
    EXPECT_EQ(status, NVFP4_MOE_STATUS_UNSUPPORTED);
}

int32_t unreachable(void* user, const void*, const int64_t*, void*, const int64_t*,
                    int64_t timeout_ms, char* error, size_t error_bytes) {
  *static_cast<int64_t*>(user) = timeout_ms;
  std::strncpy(error, "rank 7 is down", error_bytes);
  return 1;
}

TEST(CExchange, FailuresOfTheHostAndNullsAreRefused) {
  auto callbacks = nvfp4_moe::make<nvfp4_moe_exchange_callbacks>();
  int64_t used_ms = 0;
  callbacks.user = &used_ms;
  callbacks.all_to_all_v = unreachable;
  for (const auto& [given_ms, expected_ms] : std::map<int64_t, int64_t>{{0, 30000}, {50, 50}}) {
    auto* exchange = reinterpret_cast<nvfp4_moe_exchange*>(1);
    EXPECT_EQ(nvfp4_moe_exchange_connect(&callbacks, 0, 2, given_ms, &exchange),
              NVFP4_MOE_STATUS_IO);
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("handshake: rank 7 is down"));
    EXPECT_EQ(exchange, nullptr);
    EXPECT_EQ(used_ms, expected_ms);
  }
  auto* exchange = reinterpret_cast<nvfp4_moe_exchange*>(1);
  auto* group = reinterpret_cast<nvfp4_moe_thread_group*>(1);
  int64_t slots[4] = {};
  const uint64_t load[4] = {};
  for (const nvfp4_moe_status status :
       {nvfp4_moe_exchange_connect(&callbacks, 0, 2, -1, &exchange),
        nvfp4_moe_exchange_connect(nullptr, 0, 2, 0, &exchange),
        nvfp4_moe_thread_group_join(nullptr, 0, 2, 0, &exchange),
        nvfp4_moe_thread_group_create(0, &group), nvfp4_moe_exchange_use_peers(nullptr, "cpu"),
        nvfp4_moe_layer_rearrange(nullptr, slots, 4, nullptr, 0),
        nvfp4_moe_propose_placement(nullptr, 4, 2, 2, slots),
        nvfp4_moe_propose_placement(load, 4, 2, 1, slots),
        nvfp4_moe_propose_placement(load, 4, 0, 1, slots)})
    EXPECT_EQ(status, kInvalid);
  EXPECT_EQ(exchange, nullptr);
  EXPECT_EQ(group, nullptr);
  nvfp4_moe_thread_group_close(nullptr);
  nvfp4_moe_exchange_close(nullptr);
}

// tests/python has NCCL's and peers' refusals of other devices.
TEST(CExchange, DevicesThatAreNoneAreRefusedByName) {
  const nvfp4_moe::ThreadGroup group(1);
  const nvfp4_moe::Exchange exchange(group.get(), 0, 1);
  EXPECT_EQ(nvfp4_moe_exchange_use_nccl(exchange.get(), nullptr, nullptr, nullptr), kInvalid);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("rank 0: device"));
  EXPECT_EQ(nvfp4_moe_exchange_use_peers(exchange.get(), "cpu"), NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_THAT(nvfp4_moe_last_error(),
              HasSubstr("rank 0: peers: expected a device cuda:N, got cpu"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
