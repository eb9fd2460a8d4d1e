// verify --ep and bench --ep: over threads of the tool, over processes of mpirun, and their errors.
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
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

// The path of an NVFP4 checkpoint of 9 experts and one layer; its bytes on the wire are counted by
// hand below.
const std::string& packed() {
  static const TempDir dir;
  static const std::string path = [] {
    const std::string floats = dir.file("floats"), made = dir.file("packed");
    run_ok({"synthesize", floats, "--top-k", "2", "--intermediate", "64", "--vocab", "64",
            "--layers", "1", "--experts", "9", "--hidden", "64"});
    run_ok({"quantize", floats, made});
    return made;
  }();
  return path;
}

TEST(Ranks, VerifyOverRanksGivesTheBitsOfOne) {
  for (const std::string combine : {"all_to_all", "all_reduce"}) {
    const nlohmann::json report =
        run_ok({"verify", packed(), "--ep", "3", "--combine", combine, "--json"}).json();
    ASSERT_EQ(report["checks"].size(), 1u);
    EXPECT_EQ(report["checks"][0]["passed"], true) << report.dump();
    if (combine == "all_to_all") {
      EXPECT_EQ(report["checks"][0]["same_bits"], "equal");
    }
    EXPECT_EQ(report["ranks"], 3);
  }
}

TEST(Ranks, WhatOneCannotIsToldOnce) {
  using Env = std::map<std::string, std::string>;
  struct Refusal {
    const char* words;  // after verb and checkpoint
    const char* told;
    Env env = {};
  };
  const auto expect_refused = [](const char* verb, const std::vector<Refusal>& refusals) {
    for (const Refusal& refusal : refusals) {
      std::istringstream all(refusal.words);
      std::vector<std::string> words = {verb, packed()};
      for (std::string word; all >> word;) words.push_back(word);
      const ToolRun run = run_tool(words, refusal.env);
      EXPECT_NE(run.exit_code, 0) << refusal.words;
      EXPECT_THAT(run.err, HasSubstr(refusal.told));
      EXPECT_EQ(run.err.find("rank 0: "), run.err.rfind("rank 0: ")) << run.err;
    }
  };
  const Env torchrun = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "1"}};
  const Env mpirun = {{"OMPI_COMM_WORLD_SIZE", "3"}, {"NVFP4_MOE_MPI", "/nonesuch.so"}};
  const Env mpich = {{"PMI_SIZE", "3"}, {"NVFP4_MOE_MPI", "/nonesuch.so"}};
  const Env srun = {{"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "3"}, {"NVFP4_MOE_MPI", "libm.so.6"}};
  expect_refused("verify",
                 {{"--ep 3 --backend nonesuch", "nonesuch"},
                  {"--ep 3 --combine sum", "--combine"},
                  {"--ep 3 --against x", "--ep: expected none of --against"},
                  {"--ep 3 --over nccl", "--over: expected --device cuda too, got cpu"},
                  {"--ep 3 --device cuda --over wires", "--over"},
                  {"--ep 3 --device cuda:0", "each rank uses the GPU with its number"},
                  {"--ep 10", "rank 0: "},  // of 9 experts
                  {"--ep 3", "got torchrun (run `torchrun -m nvfp4_moe.verify`", torchrun},
                  {"--ep 3", "need the MPI adapter: expected /nonesuch.so", mpirun},
                  {"--ep 3", "build examples/mpi", mpich},
                  {"--ep 3", "--ep: libm.so.6: expected nvfp4_moe_mpi_connect, got none", srun}});
  expect_refused("bench", {{"--ep 2 --combine sum", "--combine"},
                           {"--ep 2 --routing hot,cold", "--routing"},
                           {"--balance", "expected --ep"},
                           {"--ep 2 --slots-per-rank 5", "--slots-per-rank: expected --balance"},
                           {"--ep 2 --balance --slots-per-rank 4", "--slots-per-rank: "},  // of 9
                           {"--ep 2 --over nccl", "--over: expected --device cuda"},
                           {"--ep 2 --steps", "--steps"},
                           {"--ep 2 --tokens 4", "NVFP4_MOE_CHECK", {{"NVFP4_MOE_CHECK", "1"}}},
                           {"--ep 10", "expected an expert for each of 10 ranks"}});
}

TEST(Ranks, ProcessesOfMpi) {
  if (!has_mpi()) GTEST_SKIP() << kNoMpi;
  for (const char* combine : {"all_to_all", "all_reduce"}) {
    const ToolRun run = run_under_mpi({"verify", packed(), "--ep", "2", "--combine", combine});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(run.out, AllOf(HasSubstr("2 ranks (processes)"), HasSubstr("pass")));
  }
  const ToolRun other = run_under_mpi({"verify", packed(), "--ep", "3"});
  EXPECT_NE(other.exit_code, 0);
  EXPECT_THAT(other.err, HasSubstr("--ep: expected 2, the number of MPI ranks, got 3"));
  const ToolRun run = run_under_mpi({"bench", packed(), "--ep", "2", "--tokens", "4", "--seconds",
                                     "0", "--threads", "1", "--routing", "zipf", "--balance"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("2 processes of 1 thread each"));
  for (const char* way : {"one_rank", "own_experts", "all_to_all", "all_reduce", "balanced"})
    EXPECT_THAT(run.out, HasSubstr(way));
}

// The number of bytes, counted by hand, for 64 hidden values. A record has 32 codes, 4 scales, a
// row scale and a flag: 44 with padding; then 2 slots and 2 weights: 60; then padding to a multiple
// of 16. A row has bf16 values.
constexpr int64_t kRankHidden = 64, kRankTopK = 2, kRecordBytes = 64, kRowBytes = 2 * kRankHidden;

std::vector<std::string> bench_words(const std::vector<std::string>& more) {
  return joined(
      {{"bench", packed(), "--seconds", "0", "--runs", "3", "--threads", "1", "--json", "--quiet"},
       more});
}

// A row as "hot all_to_all", with "balanced" if its placement is.
std::string name_of(const nlohmann::json& row) {
  return row["routing"].get<std::string>() + " " + row["combine"].get<std::string>() +
         (row["placement"] == "balanced" ? " balanced" : "");
}

TEST(Ranks, BenchTimesBothWaysBesideOneRank) {
  const nlohmann::json report =
      run_ok(bench_words({"--ep", "3", "--tokens", "1,6", "--rounds", "2"})).json();
  EXPECT_EQ(report["over"], "threads");
  EXPECT_EQ(report["checked"], true);
  std::vector<std::string> order, expected;
  nlohmann::json own_us;
  for (const auto& row : report["timings"]) {
    SCOPED_TRACE(row.dump());
    order.push_back(row["tokens"].dump() + " " + name_of(row));
    const bool one = row["combine"] == "one_rank", own = row["combine"] == "own_experts";
    EXPECT_GT(row["median_us"].get<double>(), 0);
    EXPECT_GE(row["p90_us"].get<double>(), row["median_us"].get<double>());
    ASSERT_EQ(row["rank_median_us"].size(), one ? 1u : 3u);
    for (const auto& us : row["rank_median_us"]) EXPECT_GT(us.get<double>(), 0);
    EXPECT_EQ(row["runs"], 6);
    EXPECT_EQ(row["times_one_rank"].is_null(), one);
    EXPECT_EQ(row["over"], nullptr);
    EXPECT_EQ(row["placement"], one ? nlohmann::json() : nlohmann::json("contiguous"));
    for (const char* of_exchange : {"sent_bytes", "exchange_us", "rank_sent_bytes", "agree_share"})
      EXPECT_EQ(row[of_exchange].is_null(), one || own) << of_exchange;
    const nlohmann::json& us = row["round_median_us"];
    if (own) own_us = us;
    if (one || own) continue;
    const double added_us = row["exchange_us"].get<double>();
    const auto added_in = [&](int round) {
      return us[round].get<double>() - own_us[round].get<double>();
    };
    EXPECT_NEAR(added_us, (added_in(0) + added_in(1)) / 2, 1e-6);
    if (added_us > 0)
      EXPECT_NEAR(row["wire_gb_per_s"].get<double>(),
                  row["sent_bytes"].get<double>() * 1e-3 / added_us, 1e-9);
    else
      EXPECT_EQ(row["wire_gb_per_s"], nullptr);
    const double shares = row["agree_share"].get<double>() + row["dispatch_share"].get<double>() +
                          row["combine_share"].get<double>();
    EXPECT_GT(shares, 0);
    EXPECT_LT(shares, 1) << "a part of a run is computing";
  }
  for (const char* tokens : {"1", "6"})
    for (const char* routing : {"uniform", "zipf", "hot"})
      for (const char* way : {"one_rank", "own_experts", "all_to_all", "all_reduce"})
        expected.push_back(std::string(tokens) + " " + routing + " " + way);
  EXPECT_EQ(order, expected);
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

// The rows sent back between ranks show which slots the layer has taken, and so whether the rank
// reported as busiest is the busiest.
TEST(Ranks, BenchBalancesTheLoadOfACell) {
  constexpr int kWorld = 3;
  constexpr int64_t kTokens = 6, kExperts = 9;
  const nlohmann::json report =
      run_ok(bench_words({"--ep", "3", "--tokens", "6", "--routing", "uniform,hot", "--balance",
                          "--slots-per-rank", "4", "--activation-format", "nvfp4"}))
          .json();
  const nlohmann::json& rows = report["timings"];
  ASSERT_EQ(rows.size(), 4u + 4u + 3u) << "uniform has nothing to balance";
  ASSERT_EQ(name_of(rows[9]), "hot all_to_all balanced");
  EXPECT_EQ(rows[6]["busiest_over_even"], kWorld);
  EXPECT_LE(rows[9]["busiest_over_even"].get<double>(), 1.5) << "of 12 assignments, 4 at best";

  const MoeOptions sizes = test::sizes_of(kExperts, kRankTopK, kRankHidden);
  const auto batches =
      cli::rank_batches(sizes, *Placement::contiguous(kExperts, kWorld), cli::RankRouting::kHot,
                        kTokens, 42, report["copies"].get<size_t>());
  const Placement balanced = *propose_placement(cli::load_of(batches, kExperts), kWorld, 4);
  double rows_back = 0, sent = 0;
  for (size_t batch = 2; batch < 5; ++batch) {  // the three timed ones, after two that are not
    const auto slots =
        cli::slots_of(batches.tokens[batch], kRankTopK, balanced, CombineBy::kAllToAll);
    for (size_t at = 0; at < slots.size(); ++at) {
      const auto source = static_cast<int>(at / kRankTopK) * kWorld / static_cast<int>(kTokens);
      rows_back += balanced.rank_of(slots[at]) != source;
    }
  }
  for (const auto& bytes : rows[9]["rank_sent_bytes"]["combine"]) sent += bytes.get<double>();
  EXPECT_NEAR(sent, rows_back / 3 * kRowBytes, 1e-6) << rows[9].dump();
  EXPECT_NEAR(rows[9]["busiest_over_even"].get<double>(),
              cli::busiest_over_even(batches, kRankTopK, balanced, CombineBy::kAllToAll), 1e-9);
}

// own_experts, the baseline of exchange_us, includes the shared expert as all_reduce does;
// all_to_all does not. So only all_reduce has an exchange_us.
TEST(Ranks, BenchTellsTheExchangeOfASharedExpertsLayerWhereItCan) {
  const TempDir dir;
  CheckpointBuilder builder({.model_type = "deepseek_v3", .layers = 1});
  ASSERT_TRUE(builder.has_shared());
  ASSERT_OK(builder.write(dir.file("model")));
  const nlohmann::json rows =
      run_ok({"bench", dir.file("model"), "--ep", "2", "--tokens", "2", "--seconds", "0",
              "--activation-format", "nvfp4,bf16", "--routing", "uniform", "--json", "--quiet"})
          .json()["timings"];
  ASSERT_EQ(rows.size(), 8u) << "of two formats";
  EXPECT_EQ(name_of(rows[2]), "uniform all_to_all");
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
                 {packed(), "--ep", "2", "--device", "cuda:0", "--quiet", "--json"});
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
    order.push_back(name_of(row));
    EXPECT_GT(row["median_us"], 0.0);
    EXPECT_EQ(row["agree_share"], nullptr) << "a graph has no such parts";
    const bool exchanges = row["combine"] == "all_to_all";
    EXPECT_EQ(row["over"], exchanges ? nlohmann::json("nccl") : nlohmann::json());
    EXPECT_EQ(row["exchange_us"].is_null(), !exchanges);
    EXPECT_EQ(row["sent_bytes"] > 0.0, exchanges) << row.dump();
    EXPECT_EQ(row["rank_median_us"].size(), row["combine"] == "one_rank" ? 1u : 2u);
  }
  const std::vector<std::string> expected = {"hot one_rank", "hot own_experts", "hot all_to_all",
                                             "hot own_experts balanced", "hot all_to_all balanced"};
  ASSERT_EQ(order, expected);
  EXPECT_EQ(report["timings"][2]["busiest_over_even"], 2);
  EXPECT_LT(report["timings"][4]["busiest_over_even"], 1.5);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
