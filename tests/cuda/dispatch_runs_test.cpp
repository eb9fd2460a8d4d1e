// all_to_all on devices: graphs replayed with other contents, and failing runs.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cuda/dispatch_case.h"
#include "cuda/graph.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {
namespace {

using CudaDispatchRuns = WorldTest<Between::kNccl>;

// One graph serves any routing. If a routing does not fit, every rank has NaN and an error, and the
// next replay succeeds.
TEST_P(CudaDispatchRuns, AGraphIsReplayedWithOtherContents) {
  const int world = GetParam();
  constexpr int64_t kTokens = 6;
  // The layer's weights and factors of the shared expert follow from the seed, which is the same.
  const auto of = [](Routing routing) { return made(dispatch_spec(kTokens, routing, kNvfp4, 16)); };
  const CaseData uniform = of(Routing::kUniform), partly = of(Routing::kPartlyNone),
                 hot = of(Routing::kOneExpert);
  const OneRank uniform_one(uniform), partly_one(partly), hot_one(hot);
  ExpertParallelOptions options = with_capacity(kTokens);
  on_devices(uniform, world, options, [&](Rank& rank) {
    ASSERT_OK(rank.run(0, kTokens));  // a graph cannot load what a first call loads
    rank.out();
    ASSERT_OK(rank.exchange.barrier());
    const Replay replay(rank, 0, kTokens);
    ASSERT_OK(replay.status());
    ASSERT_OK(rank.exchange.barrier());
    EXPECT_EQ(difference_of(partly, partly_one.out, replay.run(partly)), "");
    EXPECT_EQ(difference_of(hot, hot_one.out, replay.run(hot)), "");
    EXPECT_EQ(difference_of(uniform, uniform_one.out, replay.run(uniform)), "");
    EXPECT_OK(rank.status());
  });
  if (world == 1) return;  // all tokens of one rank always fit
  const int64_t expert = hot.id(0, 0) >= 0 ? hot.id(0, 0) : hot.id(0, 1);
  options.capacity = 5;
  on_devices(partly, world, options, [&](Rank& rank) {
    ASSERT_OK(rank.run(0, 1));
    rank.out();
    ASSERT_OK(rank.exchange.barrier());
    // Only rank 0 has more for one rank than fits; its message reports that to all.
    const int64_t count = rank.exchange.rank() == 0 ? kTokens : 2;
    const Replay replay(rank, 0, count);
    ASSERT_OK(replay.status());
    ASSERT_OK(rank.exchange.barrier());
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint8_t> out = replay.run(hot);
      EXPECT_TRUE(all_nan(hot, part_of(hot, out, 0, count)));
      EXPECT_EQ(part_of(hot, out, count, kTokens - count),
                std::vector<uint8_t>(
                    hot.out_bytes() / kTokens * static_cast<size_t>(kTokens - count), 0xFF))
          << "beyond the batch";
    }
    const Placement& placement = ranks_of(rank.layer).placement();
    const int64_t of_expert = placement.rank_of(placement.slot_of(expert, 0));
    const std::string words = "capacity: expected at least 6 tokens, which rank 0 has for rank " +
                              std::to_string(of_expert) +
                              ", got 5; out is NaN on every rank in 2 runs since status was last";
    EXPECT_THAT(rank.status().status().message(), HasSubstr(words));
    // an error is reported once; the NaN are counted by the run itself
    const auto again = rank.status();
    ASSERT_OK(again);
    EXPECT_EQ(again->nonfinite_outputs, static_cast<uint64_t>(count * 64));
    ASSERT_OK(rank.exchange.barrier());
    const std::vector<uint8_t> out = replay.run(partly);
    EXPECT_EQ(difference_of(partly, part_of(partly, partly_one.out, 0, count),
                            part_of(partly, out, 0, count)),
              "");
    EXPECT_OK(rank.status());
  });
}

// The device version of tests/exchange's ReceivedPackets: packets are checked before they are used.
// Altered messages may change a token's rows, but never memory outside the run (the emulator checks
// each access). A slot, row position or header that no rank sends is reported.
ATTACK_TEST_P(kReceivedPackets, CudaDispatchRuns, AnyNumberInAnyPlaceOfAMessageIsHarmless) {
  const int world = GetParam();
  if (!emulated() || world != 2)
    GTEST_SKIP() << "NCCL itself spoils no message; its double does so between two ranks";
  const CaseData data = made(dispatch_spec(3, Routing::kUniform, kNvfp4));
  const OneRank one(data);
  const PacketFormat packet(data.config);
  for (const int64_t capacity : {0, 3}) {
    ExpertParallelOptions options = with_capacity(capacity);
    on_devices(data, world, options, [&](Rank& rank) {
      const auto spoil = [&](int64_t at, uint32_t word) {
        ASSERT_OK(rank.exchange.barrier());
        if (rank.exchange.rank() == 0) {
          set_in_double("spoil with", word);
          set_in_double("spoil at", at + 1);
        }
        ASSERT_OK(rank.exchange.barrier());
      };
      const int64_t header = capacity > 0 ? 16 : 0;
      for (int64_t at = 0; at < header + packet.bytes; at += at == header ? packet.slots_at - 4 : 4)
        for (const uint32_t word : {0xFFFFFFFFu, 0x80000000u, 0x7FFFFFFFu, 0x7F800000u, 4u}) {
          if (rank.exchange.rank() == 0) attacked();
          spoil(at, word);
          ASSERT_OK(rank.run(0, 3));
          const std::vector<uint8_t> out = rank.out();
          const Status status = rank.status().status();
          EXPECT_TRUE(status.ok() || status.code() == Code::kIo ||
                      status.code() == Code::kInvalidArgument);
          if (!status.ok()) {
            EXPECT_TRUE(all_nan(data, out)) << "byte " << at << ": " << status.message();
          }
          // The first slot of a packet is one of this rank's four, or -1.
          const int me = rank.exchange.rank();
          const auto slot = static_cast<int32_t>(word);
          if (at == header + packet.slots_at && slot != -1 &&
              (slot < 4 * me || slot >= 4 * me + 4)) {
            EXPECT_THAT(status, Refused(Code::kIo, "dispatch: expected packets of slots of rank " +
                                                       std::to_string(me) + ", got"));
          }
        }
      ASSERT_OK(rank.exchange.barrier());
      if (rank.exchange.rank() == 0) set_in_double("spoil at", 0);
      ASSERT_OK(rank.exchange.barrier());
      ASSERT_OK(rank.run(0, 3));
      EXPECT_EQ(difference_of(data, one.out, rank.out()), "");
      EXPECT_OK(rank.status());
    });
  }
}

// NCCL's watch polls the progress of streams from its own thread. That must not invalidate a
// capture, and streams may already be destroyed.
TEST_P(CudaDispatchRuns, WhatIsDoneToAStreamRightBehindARunIsLeftAlone) {
  const CaseData data = made(dispatch_spec(2, Routing::kUniform, kBf16));
  on_devices(data, GetParam(), {}, [&](Rank& rank) {
    for (const auto mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
      if (mode == cudaStreamCaptureModeGlobal && GetParam() > 1)
        continue;  // it forbids too many calls of other ranks' threads
      ASSERT_OK(rank.run(0, 2));
      const auto wait = [] {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(120));  // more than two polls of the watch
        return Status();
      };
      const Graph of_nothing(rank.stream, wait, mode);
      EXPECT_OK(rank.exchange.device()->state());
    }
    Rank on_another = rank;
    ASSERT_EQ(cudaStreamCreateWithFlags(&on_another.stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_OK(on_another.run(0, 2));
    ASSERT_EQ(cudaStreamSynchronize(on_another.stream), cudaSuccess);
    ASSERT_EQ(cudaStreamDestroy(on_another.stream), cudaSuccess);
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    EXPECT_OK(rank.exchange.device()->state());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaDispatchRuns, testing::Values(1, 2, 4),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace nvfp4_moe::internal::test
