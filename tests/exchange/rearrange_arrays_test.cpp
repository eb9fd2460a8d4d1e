// Assigning other experts to slots from a caller's arrays, through the C and C++ interfaces.

#include <string>
#include <vector>

#include "exchange/ranks.h"
#include "moe/c_layer.h"

namespace nvfp4_moe::internal::test {
namespace {

// Calls body(rank, layer, arrays) on a thread for each of two ranks of the tiny layer's four
// experts.
void on_two_ranks(const std::function<void(int, nvfp4_moe::Layer&, CLayer&)>& body) {
  const nvfp4_moe::ThreadGroup group(2);
  on_threads(2, [&](int rank) {
    const nvfp4_moe::Exchange exchange(group.get(), rank, 2);
    CLayer c;
    auto parallel = nvfp4_moe::make<nvfp4_moe_expert_parallel>();
    parallel.exchange = exchange.get();
    c.options.expert_parallel = &parallel;
    nvfp4_moe::Layer layer = c.open();
    body(rank, layer, c);
  });
}

TEST(CRearrangeArrays, GiveTheBitsOfAFreshOpen) {
  on_two_ranks([](int, nvfp4_moe::Layer& layer, CLayer& c) {
    TinyBatch batch(tiny_options(), 5);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(5));
    layer.run(c_batch(batch), workspace);
    const std::vector<float> before = batch.out;
    for (const std::vector<int64_t>& placement :
         std::vector<std::vector<int64_t>>{{3, 1, 2, 0}, {0, 1, 2, 3}}) {
      layer.rearrange(placement, c.tensors);
      layer.run(c_batch(batch), workspace);
      EXPECT_TRUE(same_bits(batch.out, before));
    }
    layer.rearrange({2, 3, 0, 1}, c.tensors);
    EXPECT_THAT(layer.describe(), HasSubstr("\"placement\":\"2,3|0,1\""));
    // Each slot holds the array's expert, byte for byte.
    const int64_t first = layer.describe().find("\"rank\":0") != std::string::npos ? 2 : 0;
    for (int64_t local = 0; local < 2; ++local) {
      const Expert& expected = c.tiny.experts[static_cast<size_t>(first + local)];
      std::vector<uint8_t> codes(expected.down.codes.size());
      auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
      out.down_codes = codes.data();
      layer.unpack_expert(local, out);
      EXPECT_EQ(codes, expected.down.codes);
    }
    layer.run(c_batch(batch), workspace);
    EXPECT_TRUE(same_bits(batch.out, before));
  });
}

TEST(CRearrangeArrays, WhatOneRankGetsWrongReachesAllAndNothingChanges) {
  on_two_ranks([](int rank, nvfp4_moe::Layer& layer, CLayer& c) {
    TinyBatch batch(tiny_options(), 4);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(4));
    layer.run(c_batch(batch), workspace);
    const std::vector<float> before = batch.out;
    const bool wrong = rank == 1;
    auto* const handle = const_cast<nvfp4_moe_layer*>(layer.get());
    const std::vector<int64_t> backwards{3, 2, 1, 0}, twice{3, 3, 1, 0};
    const auto refused = [&](const int64_t* slots, int64_t count,
                             const nvfp4_moe_layer_tensors* tensors, const char* message) {
      EXPECT_EQ(nvfp4_moe_layer_rearrange_tensors(handle, slots, count, tensors),
                NVFP4_MOE_STATUS_INVALID_ARGUMENT);
      EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(message));
    };
    refused(wrong ? nullptr : backwards.data(), 4, &c.tensors, "rank 1: expert_of_slot");
    refused(backwards.data(), wrong ? 3 : 4, &c.tensors, "rank 1: slots: expected 4, got 3");
    refused(wrong ? twice.data() : backwards.data(), 4, &c.tensors, "rank 1: placement");
    refused(backwards.data(), 4, wrong ? nullptr : &c.tensors, "rank 1: tensors");
    auto without = c.tensors;
    if (wrong) without.down_codes = nullptr;
    refused(backwards.data(), 4, &without, "rank 1: down_codes");
    auto narrow = c.tensors;
    if (wrong) narrow.gate_up_codes_stride = 1;
    refused(backwards.data(), 4, &narrow, "rank 1: gate_up_codes_stride");
    refused(wrong ? std::vector<int64_t>{0, 2, 1, 3}.data() : backwards.data(), 4, &c.tensors,
            "rearrange of rank 1: expected placement");
    layer.run(c_batch(batch), workspace);
    EXPECT_TRUE(same_bits(batch.out, before));
  });
}

// If an expert is illegal, other ranks have already begun to replace it.
TEST(CRearrangeArrays, AnIllegalExpertEndsTheExchangeByName) {
  on_two_ranks([](int rank, nvfp4_moe::Layer& layer, CLayer& c) {
    auto broken = c.tensors;
    std::vector<float> scales(c.tensors.down_tensor_scales, c.tensors.down_tensor_scales + 4);
    scales[0] = -1;  // expert 0, which is to go to the last slot
    broken.down_tensor_scales = scales.data();
    const std::vector<int64_t> backwards{3, 2, 1, 0};
    auto* const handle = const_cast<nvfp4_moe_layer*>(layer.get());
    for (int call = 0; call < 2; ++call) {
      EXPECT_NE(nvfp4_moe_layer_rearrange_tensors(handle, backwards.data(), 4,
                                                  rank == 1 ? &broken : &c.tensors),
                NVFP4_MOE_STATUS_OK);
      EXPECT_THAT(nvfp4_moe_last_error(), StartsWith("rank 1: slot 3, expert 0"));
    }
  });
}

TEST(CRearrangeArrays, LayersOfOneRankHaveNoSlots) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  const int64_t slots[4] = {0, 1, 2, 3};
  auto* const handle = const_cast<nvfp4_moe_layer*>(layer.get());
  EXPECT_EQ(nvfp4_moe_layer_rearrange_tensors(handle, slots, 4, &c.tensors),
            NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_EQ(nvfp4_moe_layer_rearrange_tensors(nullptr, slots, 4, &c.tensors),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
