// A layer over several ranks against one rank's: equal bits by all-to-all, within a derived bound
// by all-reduce.

#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "exchange/parallel_case.h"
#include "support/backends.h"
#include "support/case_run.h"

namespace nvfp4_moe::internal::test {
namespace {

class Parallel : public BackendTest {
 protected:
  // One in `stride` of the cases that hold all experts and have at least as many as there are
  // ranks. batch_invariant: bits are compared across batches.
  void for_cases(int stride, const std::function<void(const CaseData&)>& body) {
    int64_t seen = 0, used = 0;
    std::set<ActivationFormat> formats;
    for (Case spec : case_table()) {
      if (spec.range.count != spec.options.num_experts || spec.options.num_experts < 4 ||
          spec.tokens > 65)
        continue;
      if (++seen % stride != 0) continue;
      SCOPED_TRACE(spec.name);
      spec.options.batch_invariant = true;
      const auto data = must(make_case(spec));
      if (declines(backend(), data->config)) continue;
      formats.insert(spec.options.activation_format);
      ++used;
      body(*data);
      if (HasFailure()) return;
    }
    EXPECT_GT(used, 20);
    EXPECT_EQ(formats.size(), 4u);
  }
  static std::string same(const CaseData& data, const std::vector<uint8_t>& expected,
                          const std::vector<uint8_t>& actual) {
    return difference(expected, actual, data.spec.out_dtype, data.spec.options.hidden_size);
  }
};

// Placements of the experts for a world of several ranks.
std::vector<std::pair<const char*, Placement>> placements(int64_t experts, int world) {
  std::vector<std::pair<const char*, Placement>> all{
      {"contiguous", *Placement::contiguous(experts, world)},
      {"round robin", round_robin(experts, world)}};
  if (experts % world == 0 && world > 1) all.emplace_back("redundant", redundant(experts, world));
  return all;
}

// A rank's counts for its own tokens and experts; summed over the ranks they are one rank's counts.
std::array<uint64_t, 11> counts(const RunStatus& s) {
  return {s.bad_expert_ids,      s.nonfinite_tokens,       s.nonfinite_rows,
          s.hidden_blocks,       s.hidden_saturated,       s.hidden_zeroed,
          s.intermediate_blocks, s.intermediate_saturated, s.intermediate_zeroed,
          s.nonfinite_weights,   s.nonfinite_outputs};
}

// Some of the runs have all tokens on one rank, messages of one size, or a host's functions. Their
// periods have no factor in common with the number of placements of a case.
TEST_P(Parallel, AllToAllGivesTheBitsAndCountsOfOneRank) {
  int64_t turn = 0;
  for_cases(9, [&](const CaseData& data) {
    CaseRun one(backend(), data);
    const std::vector<uint8_t> expected = one.run(data);
    for (const int world : {1, 2, 4})
      for (const auto& [name, placement] : placements(data.spec.options.num_experts, world)) {
        ExpertParallelOptions options = with_capacity(turn % 3 == 0 ? data.spec.tokens : 0);
        options.placement = placement;
        const Tokens tokens = turn % 7 == 3 ? Tokens::kAllOnLast : Tokens::kEven;
        const Over over = turn % 5 < 2 ? Over::kCallbacks : Over::kThreads;
        ++turn;
        SCOPED_TRACE(std::string(name) + " on " + std::to_string(world) + ", capacity " +
                     std::to_string(options.capacity) + ", " + name_of(over) +
                     (tokens == Tokens::kEven ? "" : ", all on one rank"));
        const ParallelRun run = run_parallel(backend(), data, world, options, tokens, over);
        EXPECT_THAT(run.messages, Each(""));
        EXPECT_EQ(same(data, expected, run.out), "");
        std::array<uint64_t, 11> sum{};
        for (const RunStatus& status : run.statuses)
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += counts(status)[i];
        EXPECT_EQ(sum, counts(*one.buffers().status));
      }
  });
}

Case sized(int64_t tokens, Routing routing, ActivationFormat format) {
  Case spec = sized_case(8, 2, 64, 48, tokens);
  spec.name = "sized";
  spec.options.activation_format = format;
  spec.options.batch_invariant = true;
  spec.routing = routing;
  return spec;
}

// Each of two ranks has every expert.
TEST_P(Parallel, RowsOfARedundantExpertAreDividedAmongItsRanks) {
  constexpr int64_t kTokens = 8;
  const auto blocks = [&](int64_t tokens, int64_t second, CombineBy combine) {
    CaseData data = *make_case(sized(tokens, Routing::kUniform, ActivationFormat::kNvfp4));
    choose_expert_0(data, second);
    ExpertParallelOptions options{.combine = combine, .placement = redundant(8, 2)};
    const ParallelRun run = run_parallel(backend(), data, 2, options);
    EXPECT_THAT(run.messages, Each(""));
    return std::array{run.statuses[0].intermediate_blocks, run.statuses[1].intermediate_blocks};
  };
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    const uint64_t of_row = 48 / 16;
    EXPECT_THAT(blocks(kTokens, -1, combine), Each(kTokens / 2 * of_row))
        << to_string(combine) << ", always first";
    EXPECT_THAT(blocks(1, 1, combine), Each(of_row))
        << to_string(combine) << ", one token's two experts";
  }
}

TEST_P(Parallel, AllToAllOfOneToManyTokensOfEveryRouting) {
  constexpr std::array kFormats = {ActivationFormat::kNvfp4, ActivationFormat::kBf16,
                                   ActivationFormat::kInt8Block, ActivationFormat::kFp8};
  // 7 routings, so that each token count runs with all formats and each routing with most
  size_t turn = 0;
  for (const int64_t tokens : {1, 2, 5, 64, 511, 8192})
    for (const Routing routing :
         {Routing::kUniform, Routing::kZipf, Routing::kOneExpert, Routing::kEmptyExperts,
          Routing::kPartlyNone, Routing::kAllNone, Routing::kBadIds}) {
      const auto data = must(make_case(sized(tokens, routing, kFormats[turn++ % kFormats.size()])));
      SCOPED_TRACE(std::string(to_string(routing)) + " of " + std::to_string(tokens));
      const ParallelRun run = run_parallel(backend(), *data, 4, {});
      EXPECT_THAT(run.messages, Each(""));
      EXPECT_EQ(same(*data, CaseRun(backend(), *data).run(*data), run.out), "");
    }
}

// The sum over k of |weight * row|, and the shared expert's, of each element of out.
std::vector<double> sums_of_magnitudes(const CaseRun& run, const CaseData& data) {
  const MoeOptions& options = data.spec.options;
  const LayerBuffers& buffers = run.buffers();
  const int64_t hidden = options.hidden_size;
  const DType dtype = options.row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  std::vector<double> sums;
  for (int64_t token = 0; token < data.spec.tokens; ++token) {
    std::vector<double> sum(static_cast<size_t>(hidden));
    const auto add = [&](const void* rows, int64_t index, double weight) {
      std::vector<float> values(sum.size());
      to_floats(static_cast<const std::byte*>(rows) + index * hidden * bits(dtype) / 8, dtype,
                hidden, values.data());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += std::fabs(weight * double{values[i]});
    };
    const auto in = [](const auto& weights, int64_t index) {
      return double{weights[static_cast<size_t>(index)]};
    };
    const bool after_down = options.router_weight == RouterWeight::kAfterDown;
    for (int64_t at = token * options.top_k; at < (token + 1) * options.top_k; ++at)
      if (buffers.row_of_assignment[at] >= 0)
        add(buffers.routed.rows_out, buffers.row_of_assignment[at],
            after_down ? in(data.topk_weights, at) : 1.0);
    if (buffers.shared.experts > 0)
      add(buffers.shared.rows_out, token,
          data.shared_weights.empty() ? 1.0 : in(data.shared_weights, token));
    sums.insert(sums.end(), sum.begin(), sum.end());
  }
  return sums;
}

// One rank adds n = top_k (+ 1) products, one rounding each; n ranks add the same products in
// parts, and then the parts: each within (roundings) u S of the exact sum, S being the sum of
// magnitudes and u = 2^-24. Their difference is at most (2 n + world - 1) u S, times 1 + 2^-16 for
// the terms of higher order.
TEST_P(Parallel, AllReduceAgreesWithinOneMoreSum) {
  double worst = 0;
  for_cases(9, [&](const CaseData& original) {
    CaseData data = original;
    data.spec.out_dtype = DType::kF32;
    CaseRun one(backend(), data);
    const std::vector<float> expected = to_floats(one.run(data), DType::kF32);
    const std::vector<double> magnitudes = sums_of_magnitudes(one, data);
    const auto products =
        static_cast<double>(data.spec.options.top_k + (one.buffers().shared.experts > 0 ? 1 : 0));
    for (const int world : {1, 2, 4}) {
      for (const auto& [name, placement] : placements(data.spec.options.num_experts, world)) {
        SCOPED_TRACE(std::string(name) + " on " + std::to_string(world));
        ExpertParallelOptions options{.combine = CombineBy::kAllReduce, .placement = placement};
        const ParallelRun run = run_parallel(backend(), data, world, options);
        ASSERT_THAT(run.messages, Each(""));
        for (const auto& out : run.outs) EXPECT_EQ(out, run.out) << "ranks differ";
        const std::vector<float> actual = to_floats(run.out, DType::kF32);
        for (size_t i = 0; i < expected.size(); ++i) {
          if (std::isnan(expected[i]) || std::isinf(magnitudes[i])) {
            ASSERT_EQ(std::isfinite(expected[i]), std::isfinite(actual[i])) << i;
            continue;
          }
          const double bound =
              (2 * products + world - 1) * 0x1p-24 * (1 + 0x1p-16) * magnitudes[i] + 0x1p-149;
          const double error = std::fabs(double{expected[i]} - double{actual[i]});
          ASSERT_LE(error, bound) << i << ": " << expected[i] << " and " << actual[i];
          if (world == 1) {
            EXPECT_EQ(error, 0) << "one rank adds as a layer of one rank does";
          }
          if (magnitudes[i] > 0) worst = std::max(worst, error / bound);
        }
      }
    }
  });
  EXPECT_GT(worst, 0) << "no order of summation was seen to differ: the cases test nothing";
}

TEST_P(Parallel, AllReduceRoundsItsSumOnceAndCountsWhatOverflows) {
  const ExpertParallelOptions options = combined_by(CombineBy::kAllReduce);
  Case spec = sized(9, Routing::kUniform, ActivationFormat::kBf16);
  const auto narrow = must(make_case(spec));
  spec.out_dtype = DType::kF32;
  const auto wide = must(make_case(spec));
  const ParallelRun sums = run_parallel(backend(), *wide, 4, options);
  std::vector<uint8_t> rounded(narrow->out_bytes());
  const std::vector<float> values = to_floats(sums.out, DType::kF32);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = bf16_from_float(values[i]);
    std::memcpy(rounded.data() + 2 * i, &bits, 2);
  }
  for (const Over over : {Over::kThreads, Over::kCallbacks})
    EXPECT_EQ(run_parallel(backend(), *narrow, 4, options, Tokens::kEven, over).out, rounded);

  spec.data = DataKind::kNan;
  spec.out_dtype = DType::kBf16;
  const auto broken = must(make_case(spec));
  CaseRun one(backend(), *broken);
  one.run(*broken);
  ASSERT_GT(one.buffers().status->nonfinite_outputs, 0u);
  for (const RunStatus& status : run_parallel(backend(), *broken, 2, options).statuses)
    EXPECT_EQ(status.nonfinite_outputs, one.buffers().status->nonfinite_outputs);
}

// Ranks 1 and 2 of three fell back after a failed self-check, each to another backend.
TEST(ParallelOpen, AllRanksTakeTheBackendOfARankThatFellBack) {
  const auto data = must(make_case(sized(4, Routing::kUniform, ActivationFormat::kBf16)));
  const std::vector<const Backend*> hosts = runnable_backends();
  ASSERT_GE(hosts.size(), 2u);
  const Backend* const first = hosts.front();
  const Backend* const last = hosts.back();
  CheckReport passed{CheckScope::of(*first, data->config), false, KeptCheck{}}, failed = passed;
  failed.kept->outcome.verdict = CheckOutcome::Verdict::kFailed;
  failed.kept->outcome.difference = "here";
  const auto all = [&](bool any_fell_back, const std::string& forced) {
    const BackendSelection choices[] = {{first, passed}, {hosts[1], failed}, {last, failed}};
    std::array<BackendSelection, 3> taken{};
    on_ranks(Over::kThreads, 3, kLong, [&](Exchange& exchange) {
      const int rank = exchange.rank();
      taken[static_cast<size_t>(rank)] = *must(backend_of_all(
          any_fell_back ? choices[rank] : BackendSelection{choices[rank].backend, {}}, data->config,
          host_facts(), rank == 0 ? forced : "auto", exchange));
    });
    return taken;
  };
  const auto takes = [](const Backend* backend) {
    return testing::Field("backend", &BackendSelection::backend, backend);
  };
  const auto fell_back = all(true, "auto");
  EXPECT_THAT(fell_back, testing::Each(takes(last)));
  // A rank that passed reports the same as the others, and which rank failed.
  for (const BackendSelection& selection : fell_back) {
    ASSERT_TRUE(selection.check);
    EXPECT_STREQ(selection.check->state(), "failed");
    EXPECT_EQ(selection.check->scope.backend, first);
  }
  EXPECT_EQ(fell_back[0].check->kept->outcome.difference,
            "it failed on rank " + std::to_string(hosts[1] == last ? 1 : 2) +
                ", and all ranks use one backend");
  EXPECT_EQ(fell_back[1].check->kept->outcome.difference, "here");
  const auto forced = all(true, first->name);
  EXPECT_THAT(forced, testing::ElementsAre(takes(first), takes(last), takes(last)));
  EXPECT_STREQ(forced[0].check->state(), "passed");
  // Other differences stay, and are refused when the ranks compare their configs.
  EXPECT_THAT(all(false, "auto"), testing::ElementsAre(takes(first), takes(hosts[1]), takes(last)));
}

INSTANTIATE_TEST_SUITE_P(Hosts, Parallel, testing::ValuesIn(host_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
