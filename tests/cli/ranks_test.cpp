// verify --ep: over threads of the tool, over processes that a launcher's variables connect, and what it refuses.
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "cli/run_tool.h"
#include "exchange/socket.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::test {
namespace {

using testing::HasSubstr;
using testing::Not;

// An NVFP4 checkpoint of two layers and 8 experts, made once.
const std::string& packed() {
  static const TempDir dir;
  static const std::string path = [] {
    const std::string floats = dir.file("floats"), made = dir.file("packed");
    EXPECT_EQ(run_tool({"synthesize", floats, "--layers", "2", "--experts", "8", "--top-k", "2", "--hidden", "128",
                        "--intermediate", "64", "--vocab", "64"})
                  .exit_code,
              0);
    EXPECT_EQ(run_tool({"quantize", floats, made}).exit_code, 0);
    return made;
  }();
  return path;
}

// Over ranks: threads of the tool, and processes that a launcher's variables connect.
TEST(Ranks, VerifyOverRanksGivesTheBitsOfOne) {
  for (const std::string combine : {"all_to_all", "all_reduce"}) {
    const ToolRun run = run_tool({"verify", packed(), "--ep", "3", "--combine", combine, "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err << run.out;
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
  const auto refused = [](const std::vector<std::string>& more, const std::map<std::string, std::string>& env = {}) {
    std::vector<std::string> arguments = {"verify", packed(), "--ep", "3"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ToolRun run = run_tool(arguments, env);
    EXPECT_NE(run.exit_code, 0);
    return run.err;
  };
  EXPECT_THAT(refused({"--backend", "nonesuch"}), HasSubstr("nonesuch"));
  EXPECT_THAT(refused({"--combine", "sum"}), HasSubstr("--combine"));
  EXPECT_THAT(refused({"--against", "x"}), HasSubstr("--ep: expected neither"));
  EXPECT_THAT(refused({"--ep", "99"}), HasSubstr("--ep"));
  EXPECT_THAT(refused({}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "9"}}),
              HasSubstr("--ep: expected 2, the ranks that torchrun started, got 3"));
  const std::string few = run_tool({"verify", packed(), "--ep", "9"}).err;  // of 8 experts
  EXPECT_THAT(few, HasSubstr("rank 0: "));
  EXPECT_EQ(few.find("rank 0: "), few.rfind("rank 0: ")) << few;
}

// As under torchrun: each process is one rank, and rank 0 says it for all.
TEST(Ranks, VerifyOverProcessesThatALauncherStarted) {
  const auto taken = listen_on("127.0.0.1", 0);
  ASSERT_OK(taken);
  const int port = *local_port(*taken) - 1;
  const_cast<Socket&>(*taken).close();
  std::vector<ToolRun> runs(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      runs[static_cast<size_t>(rank)] =
          run_tool({"verify", packed(), "--ep", "2"}, {{"RANK", std::to_string(rank)},
                                                       {"WORLD_SIZE", "2"},
                                                       {"MASTER_ADDR", "127.0.0.1"},
                                                       {"MASTER_PORT", std::to_string(port)}});
    });
  for (std::thread& rank : ranks) rank.join();
  for (const ToolRun& run : runs) EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(runs[0].out, HasSubstr("2 ranks (processes)"));
  EXPECT_THAT(runs[0].out, HasSubstr("equal"));
  EXPECT_THAT(runs[1].out, Not(HasSubstr("equal")));
}

}  // namespace
}  // namespace nvfp4_moe::test
