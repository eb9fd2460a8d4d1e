// Errors for mistyped command lines, the source of the number of threads, and progress lines that
// fit the terminal.
#include <thread>

#include "cli/console/parse_error.h"
#include "cli/console/progress_bar.h"
#include "cli/run_tool.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

TEST(Usage, NearestTakesSmallMistakesAlone) {
  const std::vector<std::string> names = {"inspect", "run", "bench", "--device"};
  EXPECT_EQ(cli::nearest("inspct", names), "inspect");
  EXPECT_EQ(cli::nearest("isnpect", names), "inspect");
  EXPECT_EQ(cli::nearest("rum", names), "run");
  EXPECT_EQ(cli::nearest("--deviec", names), "--device");
  EXPECT_EQ(cli::nearest("xyz", names), "");
  EXPECT_EQ(cli::nearest("", names), "");
}

// The environment's number of threads is used unless the command line names one; nonsense in it is
// an error.
TEST(Usage, ThreadsComeFromTheEnvironmentUnlessTheyAreNamed) {
  const auto threads = [](std::vector<std::string> more,
                          const std::map<std::string, std::string>& env) {
    std::vector<std::string> words = {"bench", "--shape", "A", "--experts", "1", "--tokens",
                                      "1",     "--runs",  "1", "--seconds", "0", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const ToolRun run = run_ok(words, env);
    return run.json()["host"]["threads"].get<int>();
  };
  EXPECT_EQ(threads({}, {{"NVFP4_MOE_THREADS", "3"}}), 3);
  EXPECT_EQ(threads({"--threads", "2"}, {{"NVFP4_MOE_THREADS", "3"}}), 2);
  const ToolRun wrong = run_tool({"doctor"}, {{"NVFP4_MOE_THREADS", "many"}});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err,
              HasSubstr("NVFP4_MOE_THREADS: expected a number from 1 to 4096, got \"many\""));
}

Progress long_progress() {
  Progress progress;
  progress.what = "pack";
  // two wide characters
  progress.item = "layer 12 expert 255 of a checkpoint with a long name \xE4\xB8\xAD\xE6\x96\x87";
  progress.done = 123;
  progress.total = 256;
  progress.done_bytes = int64_t{3} << 30;
  progress.total_bytes = int64_t{6} << 30;
  progress.elapsed_s = 2;
  return progress;
}

TEST(ProgressLine, FitsItsColumns) {
  const std::string whole = cli::fitted_progress_text(long_progress(), 1000);
  EXPECT_THAT(whole, HasSubstr("[############............]"));
  EXPECT_THAT(whole, EndsWith("\xE6\x96\x87"));
  // All characters are ASCII except two, which take three bytes and two columns each.
  const int columns = static_cast<int>(whole.size()) - 2;
  EXPECT_EQ(cli::fitted_progress_text(long_progress(), columns), whole);
  for (int narrow = columns - 1; narrow >= 0; --narrow) {
    const std::string text = cli::fitted_progress_text(long_progress(), narrow);
    const bool whole_text = text.ends_with("\xE6\x96\x87");
    EXPECT_LE(text.size(), static_cast<size_t>(narrow) + (whole_text ? 2 : 1)) << text;
    EXPECT_TRUE(whole_text || text.ends_with(narrow > 1 ? ".." : narrow == 1 ? "." : "")) << text;
    EXPECT_TRUE(whole_text || text.find('[') == std::string::npos)
        << text;  // the bar is dropped before any of the text
  }
  EXPECT_EQ(cli::fitted_progress_text(long_progress(), 20), "pack  50%  123/256..");
}

// Each redraw queries the width again and never writes more than one line holds.
TEST(ProgressLine, IsRedrawnWithinAWindowThatIsResized) {
  std::mutex mutex;
  std::vector<std::string> writes;
  std::atomic<int> columns{200};
  const auto drawn = [&](size_t least) {
    for (int i = 0; i < 2000; ++i) {
      {
        const std::lock_guard lock(mutex);
        if (writes.size() >= least) return writes.size();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return size_t{0};
  };
  cli::ProgressStyle style;
  style.terminal = true;
  style.period = std::chrono::milliseconds(2);
  style.write = [&](std::string_view text) {
    const std::lock_guard lock(mutex);
    writes.emplace_back(text);
  };
  style.columns = [&] { return columns.load(); };
  {
    cli::ProgressBar bar(style);
    bar.callback()(long_progress());
    const size_t before = drawn(2);
    ASSERT_GT(before, 0u);
    columns = 30;
    ASSERT_GT(drawn(before + 3), 0u);
  }
  EXPECT_THAT(writes.front(), HasSubstr("[####"));
  const std::string& last = writes[writes.size() - 2];  // before the line is cleared
  EXPECT_TRUE(last.starts_with("\r") && last.ends_with("\x1b[K")) << last;
  EXPECT_LE(last.size(), 29u + 4u) << last;
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
