// A layer over several ranks that cannot open or run: every rank reports the cause, and continues
// if it can.

#include <atomic>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "exchange/parallel_case.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"

namespace nvfp4_moe::internal::test {
namespace {

Case small(int64_t tokens = 12) {
  Case spec = sized_case(8, 2, 64, 48, tokens);
  return spec;
}
CaseData made(const Case& spec) { return *must(make_case(spec)); }

// Each rank's message from opening the layer; `change` alters one rank's arguments.
struct Arguments {
  CaseData data;
  LayerSource source;
  LayerOptions options;
  ExpertParallelOptions parallel;
};
std::vector<std::string> opened(int world,
                                const std::function<void(int rank, Arguments&)>& change) {
  std::vector<std::string> messages(static_cast<size_t>(world));
  on_ranks(Over::kThreads, world, kCaseTimeout, [&](Exchange& exchange) {
    Arguments arguments{made(small()), {}, {}, {}};
    arguments.source = source_of(arguments.data);
    arguments.options = options_of(arguments.data);
    change(exchange.rank(), arguments);
    const auto layer = open_over_ranks(arguments.data.config, arguments.source, arguments.options,
                                       arguments.parallel, borrowed(exchange));
    messages[static_cast<size_t>(exchange.rank())] = layer.status().message();
    EXPECT_OK(exchange.barrier());
  });
  return messages;
}

std::vector<std::string> opened(int world, int changed,
                                const std::function<void(Arguments&)>& change) {
  return opened(world, [&](int rank, Arguments& arguments) {
    if (rank == changed) change(arguments);
  });
}

TEST(ParallelOpen, ConfigsThatDifferAreNamedOnEveryRank) {
  EXPECT_THAT(opened(3, 2,
                     [](Arguments& a) {
                       Case spec = small();
                       spec.options.top_k = 3;
                       a.data = made(spec);
                     }),
              Each("config of rank 2: expected top_k 2 as on rank 0, got 3"));
  EXPECT_THAT(opened(3, 2, [](Arguments& a) { a.options.limits.max_tokens = 13; }),
              Each("config of rank 2: expected max_tokens 12 as on rank 0, got 13"));
  EXPECT_THAT(opened(3, 2, [](Arguments& a) { a.parallel.combine = CombineBy::kAllReduce; }),
              Each("config of rank 2: expected combine all_to_all as on rank 0, got all_reduce"));
  EXPECT_THAT(opened(3, 2, [](Arguments& a) { a.parallel.capacity = 5; }),
              Each("config of rank 2: expected capacity 0 as on rank 0, got 5"));
  EXPECT_THAT(opened(3, 2, [](Arguments& a) { a.parallel.placement = round_robin(8, 3); }),
              Each("config of rank 2: expected placement 0,1|2,3,4|5,6,7 as on rank 0, got "
                   "0,3,6|1,4,7|2,5,0"));
  EXPECT_THAT(opened(3, 2, [](Arguments& a) { a.source.scales.hidden = 0.5f; }),
              Each(HasSubstr("hidden input_scale")));
  EXPECT_THAT(opened(3, 2, [](Arguments&) {}), Each(""));
}

TEST(ParallelOpen, ARankThatCannotLoadEndsAllWithItsMessage) {
  EXPECT_THAT(opened(3, 1,
                     [](Arguments& a) {
                       a.source.expert = [](int64_t expert) -> Result<LoadedExpert> {
                         return bad_input("expert " + std::to_string(expert) +
                                          ": expected its file, got none");
                       };
                     }),
              Each("rank 1: expert 2: expected its file, got none"));
  EXPECT_THAT(opened(2, 1,
                     [](Arguments& a) {
                       a.source.expert = [](int64_t) -> Result<LoadedExpert> {
                         throw std::bad_alloc();
                       };
                     }),
              Each(HasSubstr("rank 1: out of memory")));
  EXPECT_THAT(opened(2, 0, [](Arguments& a) { a.options.backend = "nonesuch"; }),
              Each(HasSubstr("rank 0: backend")));
}

TEST(ParallelOpen, OptionsThatCannotBeAreRefusedOnAll) {
  EXPECT_THAT(opened(2, 1,
                     [](Arguments& a) {
                       a.options.range = {0, 4};
                     }),
              Each(HasSubstr("rank 1: expert range")));
  EXPECT_THAT(opened(2, 1, [](Arguments& a) { a.options.device = "cuda:0"; }),
              Each(HasSubstr("rank 1: device")));
  EXPECT_THAT(opened(2, 1, [](Arguments& a) { a.parallel.capacity = 13; }),
              Each(HasSubstr("capacity: expected at most")));
  EXPECT_THAT(opened(2, 1, [](Arguments& a) { a.parallel.capacity = -1; }),
              Each(HasSubstr("capacity: expected 0 or more")));
  EXPECT_THAT(opened(2, 1,
                     [](Arguments& a) {
                       a.parallel.combine = CombineBy::kAllReduce;
                       a.parallel.capacity = 1;
                     }),
              Each(HasSubstr("expected 0 with all_reduce")));
  EXPECT_THAT(
      opened(2, 1, [](Arguments& a) { a.parallel.placement = *Placement::contiguous(8, 4); }),
      Each(HasSubstr("rank 1: placement: expected one of 8 experts on 2 ranks")));
  EXPECT_THAT(opened(2, [](int, Arguments& a) { a.options.limits.max_tokens = int64_t{1} << 60; }),
              Each(HasSubstr("rank 0: max_tokens")));
}

// A layer on each rank of a world, and the data it runs.
struct OpenRank {
  Exchange& exchange;
  const CaseData& data;
  MoeLayer& layer;
  PoisonedWorkspace workspace;
  std::vector<uint8_t> out;

  Status run(const std::function<void(Batch&)>& change = {}) {
    out.assign(data.out_bytes(), 0xFF);
    Batch batch = slice_of(data, 0, data.spec.tokens, out.data());
    if (change) change(batch);
    return layer.run(batch, workspace.data(), workspace.size_bytes());
  }
};
void on_layers(int world, const CaseData& data, const ExpertParallelOptions& parallel,
               const std::function<void(OpenRank&)>& body) {
  on_ranks(Over::kThreads, world, kCaseTimeout, [&](Exchange& exchange) {
    const LayerSource source = source_of(data);
    const auto layer =
        must(open_over_ranks(data.config, source, options_of(data), parallel, borrowed(exchange)));
    OpenRank rank{exchange, data, **layer, PoisonedWorkspace((*layer)->workspace_bytes()), {}};
    body(rank);
    (void)exchange.barrier();  // fails if a test breaks the exchange
  });
}

TEST(ParallelRun, ARankWithAWrongBatchEndsTheRunOnAllAndNoLater) {
  const CaseData data = made(small());
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    const ExpertParallelOptions options = combined_by(combine);
    on_layers(3, data, options, [&](OpenRank& rank) {
      const bool wrong = rank.exchange.rank() == 1;
      Status status = rank.run([&](Batch& batch) {
        if (wrong) batch.hidden = nullptr;
      });
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_EQ(status.message(), "rank 1: hidden: expected a pointer, got null");
      EXPECT_EQ(rank.out, std::vector<uint8_t>(rank.out.size(), 0xFF))
          << "out is written by a run that fails";
      EXPECT_OK(rank.run());

      status = rank.run([&](Batch& batch) {
        if (wrong) batch.tokens = 13;
      });
      EXPECT_EQ(status.message(),
                "rank 1: tokens: expected 0 to 12, got 13; open the layer with a larger "
                "max_tokens, or split the batch");
      status = rank.layer.run(slice_of(data, 0, 12, rank.out.data()), rank.workspace.data(),
                              rank.workspace.size_bytes() - (wrong ? 256 : 0));
      EXPECT_THAT(status.message(), HasSubstr("rank 1: workspace"));
      EXPECT_OK(rank.run());
    });
  }
}

TEST(ParallelRun, TokenCountsThatDifferAreNamedUnderAllReduce) {
  const CaseData data = made(small());
  const ExpertParallelOptions options = combined_by(CombineBy::kAllReduce);
  on_layers(3, data, options, [&](OpenRank& rank) {
    const Status status =
        rank.run([&](Batch& batch) { batch.tokens = rank.exchange.rank() == 2 ? 5 : 12; });
    EXPECT_EQ(status.message(), "tokens of rank 2: expected 12 as on rank 0, got 5");
    EXPECT_OK(rank.run());
  });
}

TEST(ParallelRun, MoreTokensThanTheCapacityAreReportedOnAllAndNoneIsDropped) {
  Case spec = small();
  spec.routing = Routing::kOneExpert;  // every token to one expert, and so to one rank
  const CaseData data = made(spec);
  const int64_t expert = data.id(0, 0) >= 0 ? data.id(0, 0) : data.id(0, 1);
  ExpertParallelOptions options = with_capacity(11);
  on_layers(4, data, options, [&](OpenRank& rank) {
    const Status status =
        rank.run([&](Batch& batch) { batch.tokens = rank.exchange.rank() == 3 ? 12 : 4; });
    EXPECT_EQ(status.message(),
              "capacity: expected at least 12 tokens, which rank 3 has for rank " +
                  std::to_string(expert / 2) + ", got 11");
    EXPECT_EQ(rank.out, std::vector<uint8_t>(rank.out.size(), 0xFF));
    EXPECT_OK(rank.run([](Batch& batch) { batch.tokens = 11; }));
  });
}

TEST(ParallelRun, ARankThatDisappearsEndsTheRunOnTheOthers) {
  const CaseData data = made(small());
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    const ExpertParallelOptions options = combined_by(combine);
    const double took = seconds_of([&] {
      on_layers(4, data, options, [&](OpenRank& rank) {
        EXPECT_OK(rank.run());
        if (rank.exchange.rank() == 2) {
          rank.exchange.abort(Status(Code::kIo, "killed"));
          return;
        }
        EXPECT_THAT(rank.run().message(), HasSubstr("rank 2: killed"));
        EXPECT_THAT(rank.run().message(), HasSubstr("rank 2: killed"));
      });
    });
    EXPECT_LT(took, 20) << "ended by the timeout";
  }
}

TEST(ParallelRun, LogitsAreDeclinedByName) {
  const CaseData data = made(small());
  on_layers(2, data, {}, [&](OpenRank& rank) {
    const auto* const some = reinterpret_cast<const SelectExperts*>(&data);  // not read
    EXPECT_THAT(rank.run([&](Batch& batch) { batch.selection = some; }).message(),
                HasSubstr("rank 0: selection"));
  });
}

TEST(ParallelRun, ASharedExpertsWeightsAreTakenWhereTheyAreRead) {
  Case spec = small();
  spec.options.shared_intermediate_size = 32;
  spec.shared_weights = true;
  const CaseData data = made(spec);
  const ExpertParallelOptions options = combined_by(CombineBy::kAllReduce);
  on_layers(2, data, options, [&](OpenRank& rank) {
    EXPECT_OK(rank.run());  // given on both, read on rank 0
    EXPECT_EQ(rank.layer.weights().config->shared_intermediate_size,
              rank.exchange.rank() == 0 ? 32 : 0);
  });
}

// Assigning logical experts to other slots replaces packed experts in place: byte for byte as a
// fresh open packs them.
TEST(ParallelRearrange, GivesTheBytesOfAFreshLayerAndTheBitsOfTheOldOne) {
  const CaseData data = made(small());
  const Placement before = redundant(8, 4);
  std::vector<int64_t> map = before.expert_of_slot();
  for (int64_t& expert : map) expert = (3 * expert + 1) % 8;
  const auto after = must(Placement::of_map(8, 4, map));
  ExpertParallelOptions options, fresh;
  options.placement = before;
  fresh.placement = *after;
  std::atomic<int> moved{0};
  on_layers(4, data, options, [&](OpenRank& rank) {
    ASSERT_OK(rank.run());
    const std::vector<uint8_t> expected = rank.out;
    const LayerSource source = source_of(data);
    ASSERT_OK(ranks_of(rank.layer).rearrange(*after, source));
    EXPECT_EQ(ranks_of(rank.layer).placement(), *after);
    ASSERT_OK(rank.run());
    EXPECT_EQ(rank.out, expected);

    const auto other = must(
        open_over_ranks(data.config, source, options_of(data), fresh, borrowed(rank.exchange)));
    const PackedWeights &a = rank.layer.weights(), &b = (*other)->weights();
    ASSERT_EQ(a.bytes.size_bytes(), b.bytes.size_bytes());
    EXPECT_EQ(std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size_bytes()), 0);
    EXPECT_EQ(a.tensor_scales, b.tensor_scales);
    for (int64_t slot = 0; slot < before.slots(); ++slot)
      moved += before.expert_of(slot) != after->expert_of(slot);
  });
  EXPECT_GT(moved.load(), 0);
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
  const struct Format {
    ActivationFormat format;
    int64_t activation_bytes;  // of a token of 64 values: codes, block scales, row scale, nonfinite
  } formats[] = {{ActivationFormat::kNvfp4, 32 + 4 + 4 + 1},
                 {ActivationFormat::kFp8, 64 + 4 + 1},
                 {ActivationFormat::kInt8Block, 64 + 16 + 1},
                 {ActivationFormat::kBf16, 128 + 1}};
  for (const Format& format : formats) {
    for (const int64_t capacity : {0, 12, 24}) {
      SCOPED_TRACE(std::string(to_string(format.format)) + ", capacity " +
                   std::to_string(capacity));
      Case spec = small();
      spec.options.activation_format = format.format;
      CaseData data = made(spec);
      const auto group = must(ThreadGroup::make(2));
      on_threads(2, [&](int rank) {
        CaseData mine = data;
        for (int64_t token = 0; token < 12; ++token)
          for (int64_t k = 0; k < 2; ++k) mine.set_id(token, k, 4 * (1 - rank) + k);
        auto called = must(CalledBack::connect(**group, rank, 2, kCaseTimeout));
        ExpertParallelOptions options = with_capacity(capacity);
        const LayerSource source = source_of(mine);
        LayerOptions limits = options_of(mine);
        limits.limits.max_tokens = 24;  // the layer does not send more because of it
        const auto layer = must(
            open_over_ranks(mine.config, source, limits, options, borrowed((*called)->exchange())));
        PoisonedWorkspace workspace((*layer)->workspace_bytes());
        std::vector<uint8_t> out(mine.out_bytes());
        const int64_t before = (*called)->sent_bytes();
        ASSERT_OK((*layer)->run(slice_of(mine, 0, 12, out.data()), workspace.data(),
                                workspace.size_bytes()));
        const int64_t packet = ((format.activation_bytes + 3) / 4 * 4 + 2 * 8 + 15) / 16 *
                               16;             // and 2 slots, 2 weights
        const int64_t rows = 12 * 2 * 64 * 2;  // of bf16
        EXPECT_EQ((*called)->sent_bytes() - before, 512 + 2 * 16 + 12 * packet + rows);
        EXPECT_OK((*called)->exchange().barrier());
      });
    }
  }
}

TEST(ParallelLoad, CountsAssignmentsOfAllRanks) {
  Case spec = small(40);
  spec.routing = Routing::kBadIds;
  const CaseData data = made(spec);
  std::vector<uint64_t> expected(8);
  for (int64_t token = 0; token < 40; ++token)
    for (int64_t k = 0; k < 2; ++k)
      if (const int64_t id = data.id(token, k); id >= 0 && id < 8)
        ++expected[static_cast<size_t>(id)];
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    const ExpertParallelOptions options = combined_by(combine);
    on_layers(4, data, options, [&](OpenRank& rank) {
      ASSERT_OK(rank.run());
      EXPECT_EQ(*ranks_of(rank.layer).local_expert_load(), expected);
      std::vector<uint64_t> all = expected;
      if (combine == CombineBy::kAllToAll)
        for (uint64_t& count : all) count *= 4;  // each rank passed the batch
      const auto gathered = must(ranks_of(rank.layer).expert_load());
      EXPECT_EQ(*gathered, all);
      ASSERT_OK(ranks_of(rank.layer).reset_expert_load());
      EXPECT_EQ(*ranks_of(rank.layer).local_expert_load(), std::vector<uint64_t>(8));
    });
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
