// A layer over several ranks that cannot open or run: every rank reports the cause, and continues
// if it can. Also its expert load, and the bytes that it sends.

#include <functional>
#include <new>
#include <string>
#include <vector>

#include "exchange/parallel_case.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::test {
namespace {

Case small(int64_t tokens = 12) { return sized_case(8, 2, 64, 48, tokens); }
CaseData made(const Case& spec) { return *must(make_case(spec)); }

struct Arguments {
  CaseData data = made(small());
  LayerSource source = source_of(data);
  LayerOptions options = options_of(data);
  ExpertParallelOptions parallel;
};

// A case changes the arguments of rank 1 of three, or of all.
TEST(ParallelOpen, WhatOneRankCannotOpenIsNamedOnEveryRank) {
  const struct {
    std::function<void(Arguments&)> change;
    const char* text;
    bool on_all = false;
  } cases[] = {
      {[](Arguments&) {}, ""},
      {[](Arguments& a) {
         Case spec = small();
         spec.options.top_k = 3;
         a.data = made(spec);
       },
       "config of rank 1: expected top_k 2 as on rank 0, got 3"},
      {[](Arguments& a) { a.options.limits.max_tokens = 13; },
       "config of rank 1: expected max_tokens 12 as on rank 0, got 13"},
      {[](Arguments& a) { a.parallel.combine = CombineBy::kAllReduce; },
       "config of rank 1: expected combine all_to_all as on rank 0, got all_reduce"},
      {[](Arguments& a) { a.parallel.capacity = 5; },
       "config of rank 1: expected capacity 0 as on rank 0, got 5"},
      {[](Arguments& a) { a.parallel.placement = round_robin(8, 3); },
       "expected placement 0,1|2,3,4|5,6,7 as on rank 0, got 0,3,6|1,4,7|2,5,0"},
      {[](Arguments& a) { a.source.scales.hidden = 0.5f; }, "hidden input_scale"},
      {[](Arguments& a) { a.options.backend = "reference"; }, "config of rank 1: expected backend"},
      {[](Arguments& a) { a.options.backend = "nonesuch"; }, "rank 1: backend"},
      {[](Arguments& a) { a.options.device = "cuda:0"; }, "rank 1: device"},
      {[](Arguments& a) {
         a.options.range = {0, 4};
       },
       "rank 1: expert range"},
      {[](Arguments& a) { a.options.limits.max_tokens = int64_t{1} << 60; }, "rank 0: max_tokens",
       true},
      {[](Arguments& a) { a.parallel.capacity = 13; }, "rank 1: capacity: expected at most"},
      {[](Arguments& a) { a.parallel.capacity = -1; }, "rank 1: capacity: expected 0 or more"},
      {[](Arguments& a) {
         a.parallel = combined_by(CombineBy::kAllReduce);
         a.parallel.capacity = 1;
       },
       "rank 1: capacity: expected 0 with all_reduce"},
      {[](Arguments& a) { a.parallel.placement = *Placement::contiguous(8, 4); },
       "rank 1: placement: expected one of 8 experts on 3 ranks"},
      {[](Arguments& a) {
         a.source.expert = [](int64_t expert) -> Result<LoadedExpert> {
           return bad_input("expert " + std::to_string(expert) + ": expected its file, got none");
         };
       },
       "rank 1: expert 2: expected its file, got none"},
      {[](Arguments& a) {
         a.source.expert = [](int64_t) -> Result<LoadedExpert> { throw std::bad_alloc(); };
       },
       "rank 1: out of memory"},
  };
  for (const auto& one : cases)
    on_ranks(Over::kThreads, 3, kCaseTimeout, [&](Exchange& exchange) {
      Arguments arguments;
      if (exchange.rank() == 1 || one.on_all) one.change(arguments);
      const auto layer = open_layer(arguments.data.config, arguments.source, arguments.options,
                                    internal::Parallel{borrowed(exchange), arguments.parallel});
      EXPECT_EQ(layer.ok(), *one.text == 0) << one.text;
      EXPECT_THAT(layer.status().message(), HasSubstr(one.text));
      EXPECT_OK(exchange.barrier());
    });
}

// A layer on each rank of a world, and the data it runs.
struct OpenRank {
  Exchange& exchange;
  const CaseData& data;
  MoeLayer& layer;
  PoisonedWorkspace workspace;
  std::vector<uint8_t> out;

  // less: bytes of the workspace to withhold.
  Status run(const std::function<void(Batch&)>& change = {}, size_t less = 0) {
    out.assign(data.out_bytes(), 0xFF);
    Batch batch = slice_of(data, 0, data.spec.tokens, out.data());
    if (change) change(batch);
    return layer.run(batch, workspace.data(), workspace.size_bytes() - less);
  }
  bool out_is_untouched() const { return out == std::vector<uint8_t>(out.size(), 0xFF); }
};
void on_layers(int world, const CaseData& data, const ExpertParallelOptions& parallel,
               const std::function<void(OpenRank&)>& body) {
  on_ranks(Over::kThreads, world, kCaseTimeout, [&](Exchange& exchange) {
    const LayerSource source = source_of(data);
    const auto layer = must(open_layer(data.config, source, options_of(data),
                                       internal::Parallel{borrowed(exchange), parallel}));
    OpenRank rank{exchange, data, **layer, PoisonedWorkspace((*layer)->workspace_bytes()), {}};
    body(rank);
    (void)exchange.barrier();  // fails if a test breaks the exchange
  });
}

TEST(ParallelRun, ARankWithAWrongBatchEndsTheRunOnAllAndNoLater) {
  const CaseData data = made(small());
  const auto* const some = reinterpret_cast<const SelectExperts*>(&data);  // not read
  const struct {
    std::function<void(Batch&)> change;
    size_t less;
    const char* text;
  } cases[] = {
      {[](Batch& batch) { batch.hidden = nullptr; }, 0, "hidden: expected a pointer, got null"},
      {[](Batch& batch) { batch.tokens = 13; }, 0, "tokens: expected 0 to 12, got 13"},
      {[some](Batch& batch) { batch.selection = some; }, 0, "selection"},
      {{}, 256, "workspace"}};
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce})
    on_layers(3, data, combined_by(combine), [&](OpenRank& rank) {
      const bool wrong = rank.exchange.rank() == 1;
      for (const auto& one : cases) {
        EXPECT_THAT(
            wrong ? rank.run(one.change, one.less) : rank.run(),
            Refused(one.less > 0 || *one.text != 's' ? Code::kInvalidArgument : Code::kUnsupported,
                    std::string("rank 1: ") + one.text));
        EXPECT_TRUE(rank.out_is_untouched()) << one.text;
        EXPECT_OK(rank.run());
      }
    });
  on_layers(3, data, combined_by(CombineBy::kAllReduce), [](OpenRank& rank) {
    EXPECT_EQ(rank.run([&](Batch& batch) { batch.tokens = rank.exchange.rank() == 2 ? 5 : 12; })
                  .message(),
              "tokens of rank 2: expected 12 as on rank 0, got 5");
    EXPECT_OK(rank.run());
  });
}

TEST(ParallelRun, MoreTokensThanTheCapacityAreReportedOnAllAndNoneIsDropped) {
  CaseData data = made(small());
  choose_expert_0(data, -1);
  on_layers(4, data, with_capacity(11), [&](OpenRank& rank) {
    const Status status =
        rank.run([&](Batch& batch) { batch.tokens = rank.exchange.rank() == 3 ? 12 : 4; });
    EXPECT_EQ(status.message(),
              "capacity: expected at least 12 tokens, which rank 3 has for rank 0, got 11");
    EXPECT_TRUE(rank.out_is_untouched());
    EXPECT_OK(rank.run([](Batch& batch) { batch.tokens = 11; }));
  });
}

// Assigning logical experts to other slots replaces packed experts in place: byte for byte as a
// fresh open packs them.
TEST(ParallelRearrange, GivesTheBytesOfAFreshLayerAndTheBitsOfTheOldOne) {
  const CaseData data = made(small());
  ExpertParallelOptions options{.placement = redundant(8, 4)}, fresh;
  std::vector<int64_t> map = options.placement->expert_of_slot();
  for (int64_t& expert : map) expert = (3 * expert + 1) % 8;
  fresh.placement = *Placement::of_map(8, 4, map);
  on_layers(4, data, options, [&](OpenRank& rank) {
    ASSERT_OK(rank.run());
    const std::vector<uint8_t> expected = rank.out;
    const LayerSource source = source_of(data);
    ASSERT_OK(ranks_of(rank.layer).rearrange(*fresh.placement, source));
    EXPECT_EQ(ranks_of(rank.layer).placement(), *fresh.placement);
    ASSERT_OK(rank.run());
    EXPECT_EQ(rank.out, expected);

    const auto other = must(open_layer(data.config, source, options_of(data),
                                       internal::Parallel{borrowed(rank.exchange), fresh}));
    const PackedWeights &a = rank.layer.weights(), &b = (*other)->weights();
    ASSERT_EQ(a.bytes.size_bytes(), b.bytes.size_bytes());
    EXPECT_EQ(std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size_bytes()), 0);
    EXPECT_EQ(a.tensor_scales, b.tensor_scales);
  });
}

TEST(ParallelRearrange, ARankThatCannotLoadEndsAll) {
  const CaseData data = made(small());
  for (const bool memory : {false, true})
    on_layers(2, data, {}, [&](OpenRank& rank) {
      EXPECT_THAT(ranks_of(rank.layer).rearrange(*Placement::contiguous(8, 4), {}).message(),
                  HasSubstr("on 2 ranks"));
      EXPECT_THAT(ranks_of(rank.layer).rearrange(redundant(8, 2), {}).message(),
                  HasSubstr("slots on rank 0"));
      LayerSource source = source_of(data);
      if (rank.exchange.rank() == 1)
        source.expert = [&](int64_t) -> Result<LoadedExpert> {
          if (memory) throw std::bad_alloc();
          return bad_input("gone");
        };
      const Status status = ranks_of(rank.layer).rearrange(round_robin(8, 2), source);
      EXPECT_THAT(status, memory ? Refused(Code::kOutOfMemory, "rank 1: ")
                                 : Refused(Code::kBadInput, "rank 1: slot 4, expert 1: gone"));
      EXPECT_EQ(rank.run().message(), status.message());  // the placement is now unknown
    });
}

// Two ranks, 12 tokens each, every id an expert of the other rank: the exact number of bytes on the
// wire in a run. Before it, each rank sends each other one 512 bytes of header and a pair of int64
// for each rank.
TEST(ParallelRun, TheWireCarriesCodesAndScales) {
  const std::pair<ActivationFormat, int64_t> activation_bytes[] = {
      // of a token of 64 values: codes, block scales, row scale, nonfinite
      {ActivationFormat::kNvfp4, 32 + 4 + 4 + 1},
      {ActivationFormat::kFp8, 64 + 4 + 1},
      {ActivationFormat::kInt8Block, 64 + 16 + 1},
      {ActivationFormat::kBf16, 128 + 1}};
  for (const auto& [format, token_bytes] : activation_bytes)
    for (const int64_t capacity : {0, 12, 24}) {
      SCOPED_TRACE(std::string(to_string(format)) + ", capacity " + std::to_string(capacity));
      Case spec = small();
      spec.options.activation_format = format;
      // with 2 slots and 2 weights
      const int64_t packet = ((token_bytes + 3) / 4 * 4 + 2 * 8 + 15) / 16 * 16;
      const int64_t rows = 12 * 2 * 64 * 2;  // of bf16
      const auto group = must(ThreadGroup::make(2));
      on_threads(2, [&](int rank) {
        CaseData mine = made(spec);
        for (int64_t token = 0; token < 12; ++token)
          for (int64_t k = 0; k < 2; ++k) mine.set_id(token, k, 4 * (1 - rank) + k);
        const auto called = must(CalledBack::connect(**group, rank, 2, kCaseTimeout));
        LayerOptions limits = options_of(mine);
        limits.limits.max_tokens = 24;  // the layer does not send more because of it
        const LayerSource source = source_of(mine);
        const auto layer = must(open_layer(
            mine.config, source, limits,
            internal::Parallel{borrowed((*called)->exchange()), with_capacity(capacity)}));
        PoisonedWorkspace workspace((*layer)->workspace_bytes());
        std::vector<uint8_t> out(mine.out_bytes());
        const int64_t before = (*called)->sent_bytes();
        ASSERT_OK((*layer)->run(slice_of(mine, 0, 12, out.data()), workspace.data(),
                                workspace.size_bytes()));
        EXPECT_EQ((*called)->sent_bytes() - before, 512 + 2 * 16 + 12 * packet + rows);
        EXPECT_OK((*called)->exchange().barrier());
      });
    }
}

TEST(ParallelLoad, CountsAssignmentsOfAllRanks) {
  Case spec = small(40);
  spec.routing = Routing::kBadIds;
  const CaseData data = made(spec);
  std::vector<uint64_t> expected(8);
  for (int64_t at = 0; at < 80; ++at)
    if (const int64_t id = data.id(at / 2, at % 2); id >= 0 && id < 8)
      ++expected[static_cast<size_t>(id)];
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce})
    on_layers(4, data, combined_by(combine), [&](OpenRank& rank) {
      ASSERT_OK(rank.run());
      EXPECT_EQ(*ranks_of(rank.layer).local_expert_load(), expected);
      std::vector<uint64_t> all = expected;
      if (combine == CombineBy::kAllToAll)
        for (uint64_t& count : all) count *= 4;  // each rank passed the batch
      EXPECT_EQ(*ranks_of(rank.layer).expert_load(), all);
      ASSERT_OK(ranks_of(rank.layer).reset_expert_load());
      EXPECT_EQ(*ranks_of(rank.layer).local_expert_load(), std::vector<uint64_t>(8));
    });
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
