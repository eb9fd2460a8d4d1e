// verify --ep and bench --ep: over threads of the tool, over processes of mpirun, and their errors.
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "cli/bench/rank_batches.h"
#include "cli/run_tool.h"
#include "parallel/balance.h"
#include "support/checkpoint_builder.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;
using testing::Not;

// The path of an NVFP4 checkpoint; `words` are synthesize's size arguments.
std::string packed_in(const TempDir& dir, std::vector<std::string> words) {
  const std::string floats = dir.file("floats"), made = dir.file("packed");
  words.insert(words.begin(),
               {"synthesize", floats, "--top-k", "2", "--intermediate", "64", "--vocab", "64"});
  EXPECT_EQ(run_tool(words).exit_code, 0);
  run_ok({"quantize", floats, made});
  return made;
}

// Two layers and 8 experts, made once.
const std::string& packed() {
  static const TempDir dir;
  static const std::string path =
      packed_in(dir, {"--layers", "2", "--experts", "8", "--hidden", "128"});
  return path;
}

// Over ranks: threads of the tool, and processes of mpirun.
TEST(Ranks, VerifyOverRanksGivesTheBitsOfOne) {
  for (const std::string combine : {"all_to_all", "all_reduce"}) {
    const ToolRun run = run_ok({"verify", packed(), "--ep", "3", "--combine", combine, "--json"});
    const nlohmann::json report = run.json();
    ASSERT_EQ(report["checks"].size(), 2u);
    for (const auto& check : report["checks"]) {
      EXPECT_EQ(check["passed"], true) << run.out;
      if (combine == "all_to_all") {
        EXPECT_EQ(check["same_bits"], "equal");
      }
    }
    EXPECT_EQ(report["ranks"], 3);
  }
}

TEST(Ranks, VerifyOverRanksSaysOnceWhatOneOfThemCannot) {
  const auto refused = [](const std::vector<std::string>& more,
                          const std::map<std::string, std::string>& env = {}) {
    const ToolRun run = run_tool(joined({{"verify", packed(), "--ep", "3"}, more}), env);
    EXPECT_NE(run.exit_code, 0);
    return run.err;
  };
  EXPECT_THAT(refused({"--backend", "nonesuch"}), HasSubstr("nonesuch"));
  EXPECT_THAT(refused({"--combine", "sum"}), HasSubstr("--combine"));
  EXPECT_THAT(refused({"--against", "x"}), HasSubstr("--ep: expected none of --against"));
  EXPECT_THAT(refused({"--over", "nccl"}),
              HasSubstr("--over: expected --device cuda too, got cpu"));
  EXPECT_THAT(refused({"--device", "cuda", "--over", "wires"}), HasSubstr("--over"));
  EXPECT_THAT(refused({"--device", "cuda", "--over", "nccl,peers"}),
              HasSubstr("--over: expected either nccl or peers"));
  EXPECT_THAT(refused({"--device", "cuda:0"}), HasSubstr("each rank uses the GPU with its number"));
  EXPECT_THAT(refused({"--ep", "99"}), HasSubstr("--ep"));
  EXPECT_THAT(refused({}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "1"}}),
              HasSubstr("got torchrun (run `torchrun -m nvfp4_moe.verify`"));
  for (const char* number_of_ranks : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    EXPECT_THAT(refused({}, {{number_of_ranks, "3"}, {"NVFP4_MOE_MPI", "/nonesuch.so"}}),
                AllOf(HasSubstr("need the MPI adapter: expected /nonesuch.so"),
                      HasSubstr("build examples/mpi")));
  EXPECT_THAT(
      refused({}, {{"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "3"}, {"NVFP4_MOE_MPI", "libm.so.6"}}),
      HasSubstr("--ep: libm.so.6: expected nvfp4_moe_mpi_connect, got none"));
  const std::string few = run_tool({"verify", packed(), "--ep", "9"}).err;  // of 8 experts
  EXPECT_THAT(few, HasSubstr("rank 0: "));
  EXPECT_EQ(few.find("rank 0: "), few.rfind("rank 0: ")) << few;
}

TEST(Ranks, VerifyUnderMpi) {
  if (!has_mpi()) GTEST_SKIP() << kNoMpi;
  for (const char* combine : {"all_to_all", "all_reduce"}) {
    const ToolRun run = run_under_mpi({"verify", packed(), "--ep", "2", "--combine", combine});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(run.out, HasSubstr("2 ranks (processes)"));
    EXPECT_THAT(run.out, HasSubstr("pass"));
  }
  const ToolRun other = run_under_mpi({"verify", packed(), "--ep", "3"});
  EXPECT_NE(other.exit_code, 0);
  EXPECT_THAT(other.err, HasSubstr("--ep: expected 2, the number of MPI ranks, got 3"));
}

// The number of bytes, counted by hand, for 64 hidden values. A record has 32 codes, 4 scales, a
// row scale and a flag: 44 with padding; then 2 slots and 2 weights: 60; then padding to a multiple
// of 16. A row has bf16 values.
constexpr int64_t kRankHidden = 64, kRankTopK = 2, kRecordBytes = 64, kRowBytes = 2 * kRankHidden;

// A small checkpoint for which the bytes on the wire are counted by hand.
const std::string& narrow() {
  static const TempDir dir;
  static const std::string path =
      packed_in(dir, {"--layers", "1", "--experts", "9", "--hidden", "64"});
  return path;
}

std::vector<std::string> bench_words(const std::vector<std::string>& more) {
  return joined(
      {{"bench", narrow(), "--seconds", "0", "--runs", "3", "--threads", "1", "--json", "--quiet"},
       more});
}

void expect_times(const nlohmann::json& row, size_t ranks) {
  EXPECT_GT(row["median_us"].get<double>(), 0) << row.dump();
  EXPECT_GE(row["p90_us"].get<double>(), row["median_us"].get<double>()) << row.dump();
  ASSERT_EQ(row["rank_median_us"].size(), ranks) << row.dump();
  for (const auto& us : row["rank_median_us"]) EXPECT_GT(us.get<double>(), 0) << row.dump();
  EXPECT_EQ(row["runs"], 3);
}

TEST(Ranks, BenchTimesBothWaysBesideOneRank) {
  const nlohmann::json report = run_ok(bench_words({"--ep", "3", "--tokens", "1,6"})).json();
  EXPECT_EQ(report["ranks"], 3);
  EXPECT_EQ(report["over"], "threads");
  EXPECT_EQ(report["checked"], true);
  std::vector<std::string> order;
  double own_us = 0;
  for (const auto& row : report["timings"]) {
    order.push_back(row["tokens"].dump() + " " + row["routing"].get<std::string>() + " " +
                    row["combine"].get<std::string>());
    const bool one = row["combine"] == "one_rank", own = row["combine"] == "own_experts";
    expect_times(row, one ? 1 : 3);
    EXPECT_EQ(row["times_one_rank"].is_null(), one);
    EXPECT_EQ(row["over"], nullptr);
    EXPECT_EQ(row["placement"], one ? nlohmann::json() : nlohmann::json("contiguous"));
    for (const char* of_exchange : {"sent_bytes", "exchange_us", "rank_sent_bytes", "agree_share"})
      EXPECT_EQ(row[of_exchange].is_null(), one || own) << of_exchange;
    if (own) own_us = row["median_us"].get<double>();
    if (one || own) continue;
    const double added_us = row["exchange_us"].get<double>();
    EXPECT_NEAR(added_us, row["median_us"].get<double>() - own_us, 1e-6);
    if (added_us > 0)
      EXPECT_NEAR(row["wire_gb_per_s"].get<double>(),
                  row["sent_bytes"].get<double>() * 1e-3 / added_us, 1e-9);
    else
      EXPECT_EQ(row["wire_gb_per_s"], nullptr);
    const double shares = row["agree_share"].get<double>() + row["dispatch_share"].get<double>() +
                          row["combine_share"].get<double>();
    EXPECT_GT(shares, 0);
    EXPECT_LT(shares, 1) << "a part of a run is computing";
    if (row["routing"] == "hot") {
      EXPECT_EQ(row["busiest_over_even"], 3);
    }
  }
  std::vector<std::string> expected;
  for (const char* tokens : {"1", "6"})
    for (const char* routing : {"uniform", "zipf", "hot"})
      for (const char* way : {"one_rank", "own_experts", "all_to_all", "all_reduce"})
        expected.push_back(std::string(tokens) + " " + routing + " " + way);
  EXPECT_EQ(order, expected);
  EXPECT_EQ(report["rounds"].size(), expected.size());
}

// Each of 3 ranks has 2 of the 6 tokens. Under hot routing all go to rank 0.
TEST(Ranks, BenchCountsTheBytesOfEachRank) {
  const ToolRun run = run_ok(bench_words(
      {"--ep", "3", "--tokens", "6", "--routing", "hot", "--activation-format", "nvfp4"}));
  const nlohmann::json report = run.json();
  const nlohmann::json& to_all = report["timings"][2]["rank_sent_bytes"];
  EXPECT_EQ(to_all["dispatch"], nlohmann::json({0.0, 2.0 * kRecordBytes, 2.0 * kRecordBytes}))
      << to_all;
  EXPECT_EQ(to_all["combine"], nlohmann::json({4.0 * kRankTopK * kRowBytes, 0.0, 0.0})) << to_all;
  const nlohmann::json& reduce = report["timings"][3]["rank_sent_bytes"];
  // Two shards of a third each to the others, then its own sum to both.
  const double shards = 4.0 * 6 * kRankHidden / 3 * 4;
  EXPECT_EQ(reduce["combine"], nlohmann::json({shards, shards, shards})) << reduce;
  EXPECT_EQ(reduce["dispatch"], nlohmann::json({0.0, 0.0, 0.0}));
  for (const auto* sent : {&to_all, &reduce})
    for (const auto& bytes : (*sent)["agree"]) EXPECT_GE(bytes.get<double>(), 2 * 512) << *sent;
}

TEST(Ranks, BenchTakesListsAndShowsWhatIsRefused) {
  const nlohmann::json report =
      run_ok(bench_words({"--ep", "2", "--tokens", "4", "--routing", "uniform", "--rounds", "2",
                          "--activation-format", "nvfp4,bf16"}),
             {{"NVFP4_MOE_CHECK", "1"}})
          .json();
  int refused = 0, timed = 0;
  for (const auto& row : report["timings"]) {
    if (row["refused"].is_null()) {
      ++timed;
      EXPECT_NE(row["combine"], "all_to_all");
      EXPECT_EQ(row["runs"], 6);
      continue;
    }
    ++refused;
    EXPECT_EQ(row["combine"], "all_to_all");
    EXPECT_EQ(row["median_us"], nullptr);
    EXPECT_THAT(row["refused"].get<std::string>(), HasSubstr("NVFP4_MOE_CHECK"));
  }
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(timed, 6);
}

// The rows sent back between ranks show which slots the layer has taken, and so whether the rank
// reported as busiest is the busiest.
TEST(Ranks, BenchBalancesTheLoadOfACell) {
  constexpr int kWorld = 3;
  constexpr int64_t kTokens = 6, kExperts = 9;
  const nlohmann::json report =
      run_ok(bench_words({"--ep", "3", "--tokens", "6", "--routing", "uniform,hot", "--balance",
                          "--slots-per-rank", "4", "--activation-format", "nvfp4"}))
          .json();
  EXPECT_EQ(report["slots_per_rank"], 4);
  std::vector<std::string> order;
  for (const auto& row : report["timings"])
    order.push_back(row["routing"].get<std::string>() + " " + row["combine"].get<std::string>() +
                    (row["placement"] == "balanced" ? " balanced" : ""));
  const std::vector<std::string> expected = {
      "uniform one_rank",        "uniform own_experts",    "uniform all_to_all",
      "uniform all_reduce",      "hot one_rank",           "hot own_experts",
      "hot all_to_all",          "hot all_reduce",         "hot own_experts balanced",
      "hot all_to_all balanced", "hot all_reduce balanced"};
  ASSERT_EQ(order, expected);

  const MoeOptions sizes = test::sizes_of(kExperts, kRankTopK, kRankHidden);
  const Placement contiguous = *Placement::contiguous(kExperts, kWorld);
  const auto batches = cli::rank_batches(sizes, contiguous, cli::RankRouting::kHot, kTokens, 42,
                                         report["copies"].get<size_t>());
  const Placement balanced = *propose_placement(cli::load_of(batches, kExperts), kWorld, 4);
  for (const size_t at : {size_t{6}, size_t{9}}) {
    const nlohmann::json& row = report["timings"][at];
    const Placement& placement = at == 9 ? balanced : contiguous;
    double rows_back = 0;
    for (size_t batch = 2; batch < 5;
         ++batch) {  // the three timed ones, after two that are not timed
      const auto slots =
          cli::slots_of(batches.tokens[batch], kRankTopK, placement, CombineBy::kAllToAll);
      for (size_t assignment = 0; assignment < slots.size(); ++assignment) {
        const auto source =
            static_cast<int>(assignment / kRankTopK) * kWorld / static_cast<int>(kTokens);
        rows_back += placement.rank_of(slots[assignment]) != source;
      }
    }
    double sent = 0;
    for (const auto& bytes : row["rank_sent_bytes"]["combine"]) sent += bytes.get<double>();
    EXPECT_NEAR(sent, rows_back / 3 * kRowBytes, 1e-6) << row.dump();
    EXPECT_NEAR(row["busiest_over_even"].get<double>(),
                cli::busiest_over_even(batches, kRankTopK, placement, CombineBy::kAllToAll), 1e-9);
  }
  EXPECT_EQ(report["timings"][6]["busiest_over_even"], kWorld);
  EXPECT_LE(report["timings"][9]["busiest_over_even"].get<double>(), 1.5)
      << "of 12 assignments, 4 each at best";
}

TEST(Ranks, BenchUnderMpi) {
  if (!has_mpi()) GTEST_SKIP() << kNoMpi;
  const ToolRun run = run_under_mpi({"bench", narrow(), "--ep", "2", "--tokens", "4", "--seconds",
                                     "0", "--threads", "1", "--routing", "zipf", "--balance"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("2 processes of 1 thread each"));
  for (const char* way : {"one_rank", "own_experts", "all_to_all", "all_reduce", "balanced"})
    EXPECT_THAT(run.out, HasSubstr(way));
}

TEST(Ranks, BenchSaysWhatItCannot) {
  const auto refused = [](const std::vector<std::string>& more, int exit_code = 2) {
    const ToolRun run = run_tool(bench_words(more));
    EXPECT_EQ(run.exit_code, exit_code) << run.err;
    return run.err;
  };
  EXPECT_THAT(refused({"--ep", "2", "--combine", "sum"}), HasSubstr("--combine"));
  EXPECT_THAT(refused({"--ep", "2", "--routing", "hot,cold"}), HasSubstr("--routing"));
  EXPECT_THAT(refused({"--routing", "hot"}), HasSubstr("expected --ep"));
  EXPECT_THAT(refused({"--balance"}), HasSubstr("expected --ep"));
  EXPECT_THAT(refused({"--ep", "2", "--slots-per-rank", "5"}),
              HasSubstr("--slots-per-rank: expected --balance"));
  EXPECT_THAT(refused({"--ep", "2", "--balance", "--slots-per-rank", "4"}),
              HasSubstr("--slots-per-rank: "));  // of 9
  EXPECT_THAT(refused({"--ep", "2", "--over", "nccl"}),
              HasSubstr("--over: expected --device cuda"));
  EXPECT_THAT(refused({"--ep", "2", "--device", "cuda", "--over", "nccl,wires"}),
              HasSubstr("--over"));
  EXPECT_THAT(refused({"--ep", "2", "--steps"}), HasSubstr("--steps"));
  EXPECT_THAT(refused({"--ep", "2", "--expert-range", "0:4"}), HasSubstr("--expert-range"));
  EXPECT_THAT(refused({"--ep", "10"}), HasSubstr("expected an expert for each of 10 ranks"));
  EXPECT_THAT(refused({"--ep", "2", "--device", "cuda:0"}),
              HasSubstr("each rank uses the GPU with its number"));
}

// own_experts, the baseline of exchange_us, includes the shared expert as all_reduce does;
// all_to_all does not. So only all_reduce has an exchange_us.
TEST(Ranks, BenchTellsTheExchangeOfASharedExpertsLayerWhereItCan) {
  const TempDir dir;
  CheckpointBuilder builder({.model_type = "deepseek_v3", .layers = 1});
  ASSERT_TRUE(builder.has_shared());
  ASSERT_OK(builder.write(dir.file("model")));
  const ToolRun run = run_ok({"bench", dir.file("model"), "--ep", "2", "--tokens", "2", "--seconds",
                              "0", "--runs", "3", "--routing", "uniform", "--json", "--quiet"});
  const nlohmann::json rows = run.json()["timings"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[1]["combine"], "own_experts");
  EXPECT_EQ(rows[2]["combine"], "all_to_all");
  EXPECT_EQ(rows[2]["exchange_us"], nullptr);
  EXPECT_NE(rows[3]["exchange_us"], nullptr);
}

// On the emulator of CUDA, over NCCL's double: two processes, each with a GPU of its own.
class RanksOnEmulatedGpus : public ::testing::Test {
 protected:
#ifdef NVFP4_MOE_EMULATED_TOOL
  void SetUp() override {
    if (!has_mpi()) GTEST_SKIP() << kNoMpi;
  }
  nlohmann::json run(std::vector<std::string> words) {
    std::error_code there;
    std::filesystem::create_symlink(NVFP4_MOE_FAKE_NCCL, dir_.file("libnccl.so.2"), there);
    words.insert(words.begin() + 1,
                 {narrow(), "--ep", "2", "--device", "cuda:0", "--quiet", "--json"});
    const std::map<std::string, std::string> env = {{"LD_LIBRARY_PATH", dir_.path().string()},
                                                    { "PTXEMU_CC",
                                                      "8.0" }};
    const ToolRun made = run_under_mpi(words, env, NVFP4_MOE_EMULATED_TOOL);
    EXPECT_EQ(made.exit_code, 0) << made.err << made.out;
    return made.json();
  }
#else
  void SetUp() override {
    GTEST_SKIP() << "built without the emulator of CUDA (NVFP4_MOE_EMULATE)";
  }
  nlohmann::json run(const std::vector<std::string>&) { return {}; }
#endif

 private:
  const TempDir dir_;
};

TEST_F(RanksOnEmulatedGpus, VerifyGivesTheBitsOfOneRank) {
  for (const std::string combine : {"all_to_all", "all_reduce"}) {
    const nlohmann::json report = run({"verify", "--tokens", "6", "--combine", combine});
    EXPECT_EQ(report["device"], "cuda:0");
    EXPECT_EQ(report["over"], "nccl");
    ASSERT_TRUE(report.contains("checks")) << report.dump();
    ASSERT_EQ(report["checks"].size(), 1u) << report.dump();
    const nlohmann::json& check = report["checks"][0];
    EXPECT_EQ(check["passed"], true) << check.dump();
    EXPECT_EQ(check["backend"], "cuda");
    EXPECT_EQ(check["batch_invariant"], combine == "all_to_all");
    if (combine == "all_to_all") {
      EXPECT_EQ(check["same_bits"], "equal");
    }
  }
}

TEST_F(RanksOnEmulatedGpus, BenchTellsWhatTheExchangeAdds) {
  const nlohmann::json report =
      run({"bench", "--tokens", "2", "--routing", "hot", "--combine", "all_to_all", "--balance",
           "--activation-format", "nvfp4", "--seconds", "0", "--runs", "1"});
  ASSERT_TRUE(report.contains("timings")) << report.dump();
  std::vector<std::string> order;
  for (const auto& row : report["timings"]) {
    order.push_back(row["combine"].get<std::string>() +
                    (row["placement"] == "balanced" ? " balanced" : ""));
    EXPECT_GT(row["median_us"], 0.0);
    EXPECT_EQ(row["agree_share"], nullptr) << "a graph has no such parts";
    const bool exchanges = row["combine"] == "all_to_all";
    EXPECT_EQ(row["over"], exchanges ? nlohmann::json("nccl") : nlohmann::json());
    EXPECT_EQ(row["exchange_us"].is_null(), !exchanges);
    if (exchanges) {
      EXPECT_GT(row["sent_bytes"], 0.0) << row.dump();
    }
    if (row["combine"] == "own_experts") {
      EXPECT_EQ(row["rank_median_us"].size(), 2u);
    }
  }
  ASSERT_EQ(order, (std::vector<std::string>{"one_rank", "own_experts", "all_to_all",
                                             "own_experts balanced", "all_to_all balanced"}));
  EXPECT_EQ(report["timings"][2]["busiest_over_even"], 2);
  EXPECT_LT(report["timings"][4]["busiest_over_even"], 1.5);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
