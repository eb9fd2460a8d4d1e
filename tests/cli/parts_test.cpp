// Parts of the command line that need no process: parsing of lists, tables, progress.
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "cli/console/progress_bar.h"
#include "cli/console/table.h"
#include "cli/console/verb.h"
#include "cli/verbs/choices.h"
#include "cli/verbs/layers.h"
#include "core/printable.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Numbers = std::vector<int64_t>;

TEST(Lists, AreNumbersRangesSweepsAndNames) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const auto& [text, expected] : std::map<std::string, Numbers>{
           {"7", {7}}, {"0,3,5-9", {0, 3, 5, 6, 7, 8, 9}}, {"5-6,6,1", {1, 5, 6}}})
    EXPECT_EQ(*parse_list(text), expected) << text;
  for (const auto& [text, expected] : std::map<std::string, Numbers>{
           {"1,8,64..512:x2", {1, 8, 64, 128, 256, 512}},
           {"512,1", {512, 1}},
           {"0..24:+8", {0, 8, 16, 24}},
           {"1..10", {1, 2, 4, 8}},  // ends at the last value that does not pass the end
           {"3..3", {3}},
           // The last step before the largest number must not wrap around.
           {"4611686018427387904..9223372036854775807:x2", {4611686018427387904}},
           {"9223372036854775800..9223372036854775807:+100", {kMost - 7}}})
    EXPECT_EQ(*parse_sweep(text), expected) << text;
  EXPECT_THAT(*parse_names("b,a:x,b"), ElementsAre("b", "a:x", "b"));
  EXPECT_EQ(*parse_first_count("16:8"), std::pair(int64_t{16}, int64_t{8}));
  EXPECT_EQ(list_text({0, 1, 2, 5, 7, 8, 9}), "0-2,5,7-9");
  EXPECT_EQ(list_text({}), "");
}

TEST(Lists, RefuseWhatIsNoListByItsText) {
  const std::pair<std::function<Status(const std::string&)>, std::vector<std::string>> cases[] = {
      {[](const auto& text) { return parse_list(text).status(); },
       {"", ",", "1,", "a", "1-", "-1", "5-3", "1--3", "1 2", "0x3", "1.5", "99999999999999999999",
        "0-9223372036854775807", "0-999999,2000000"}},
      {[](const auto& text) { return parse_sweep(text).status(); },
       {"0..8:x2", "1..8:x1", "1..8:x0", "1..8:+0", "8..1", "1..8:", "1..8:2", "1..", "..8", "",
        "0..9223372036854775807:+1"}},
      {[](const auto& text) { return parse_names(text).status(); }, {"", ",", "a,", ",a", "a,,b"}},
      {[](const auto& text) { return parse_first_count(text).status(); },
       {"16", "16:", ":8", "1:2:3", "-1:2"}},
      {[](const auto& text) { return parse_bytes(text).status(); },
       {"", "GB", "-1GB", "0", "5 GB", "nan", "inf", "1e30", "5Gb"}}};
  for (const auto& [parse, texts] : cases)
    for (const std::string& text : texts)
      EXPECT_THAT(parse(text), test::Refused(Code::kInvalidArgument, text));
}

TEST(Lists, Sizes) {
  for (const auto& [text, bytes] : std::map<std::string, uint64_t>{{"5GB", 5'000'000'000},
                                                                   {"4GiB", 4ull << 30},
                                                                   {"1.5MiB", 3u << 19},
                                                                   {"123", 123},
                                                                   {"123B", 123}})
    EXPECT_EQ(*parse_bytes(text), bytes) << text;
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(3u << 19), "1.5 MiB");
  EXPECT_EQ(duration_text(2.04), "2.0 s");
  EXPECT_EQ(duration_text(125), "2:05");
  EXPECT_EQ(duration_text(3723), "1:02:03");
}

TEST(Choices, RangesAndSlicesStayInside) {
  LocalPart part;
  EXPECT_EQ(part.range(8)->count, 8);
  for (const char* text :
       {"0:9", "8:1", "3:6", "0:0", "9223372036854775807:1", "1:9223372036854775807"}) {
    part.expert_range = text;
    EXPECT_FALSE(part.range(8).ok()) << text;
  }
  part.expert_range = "6:2";
  EXPECT_EQ(part.range(8)->first, 6);
  for (const char* text : {"0:8", "8:16", "16:64", "0:0"}) {
    part.intermediate_slice = text;
    EXPECT_FALSE(part.slice(64).ok()) << text;
  }
  part.intermediate_slice = "32:32";
  EXPECT_EQ(part.slice(64)->first, 32);
}

// A column without a title is for programs only.
TEST(Tables, AlignTextEscapeItAndKeepValues) {
  Table table({{"name", "name", false}, {"median_us", "median us"}, {"bytes", ""}});
  table.add({cell("a"), cell(1234.5678, "{:.1f}"), cell(int64_t{7})});
  table.add({cell("x\n\x1b[31m"), cell(2.0, "{:.1f}")});
  table.add({{"\xC2\x9B", nullptr}});  // a cell that was not made by cell()
  EXPECT_EQ(table.text(false),
            "| name          | median us |\n"
            "| ------------- | --------: |\n"
            "| a             |    1234.6 |\n"
            "| x\\x0A\\x1B[31m |       2.0 |\n"
            "| \\xC2\\x9B      |           |\n");
  EXPECT_EQ(table.json()[0]["median_us"].get<double>(), 1234.5678);
  EXPECT_EQ(table.json()[0]["bytes"], 7);
  EXPECT_EQ(table.json()[1]["name"], "x\n\x1b[31m");
  EXPECT_EQ(cell(std::numeric_limits<double>::infinity(), "{:.1f}").value, "inf");
  EXPECT_EQ(cell(std::numeric_limits<double>::quiet_NaN(), "{:.1f}").value, "nan");
}

TEST(Tables, ColourDoesNotMoveColumns) {
  Table table({{"ok", "result", false}, {"n", "n"}});
  table.add({verdict(true), cell(int64_t{1})});
  table.add({verdict(false), cell(int64_t{2})});
  std::string colored = table.text(true);
  EXPECT_THAT(colored, HasSubstr("\x1b["));
  for (size_t at; (at = colored.find('\x1b')) != std::string::npos;)
    colored.erase(at, colored.find('m', at) + 1 - at);
  EXPECT_EQ(colored, table.text(false));
}

// bash reads every byte but 0 back unchanged. Bytes that a terminal would act on, or that are not
// text, are written in octal, so that a digit may follow.
TEST(Console, ReproLinesSurviveAShell) {
  for (const auto& [argument, quoted] :
       std::map<std::string, std::string>{{"/a/b-c_d.safetensors", "/a/b-c_d.safetensors"},
                                          {"a b", "'a b'"},
                                          {"it's", "'it'\\''s'"},
                                          {"", "''"},
                                          {"$HOME", "'$HOME'"},
                                          {"größe", "'größe'"},
                                          {"a\x1b[31m", "$'a\\033[31m'"},
                                          {"it's\\\n7", "$'it\\'s\\\\\\0127'"},
                                          {"\xE2\x80\xAE\xFF", "$'\\342\\200\\256\\377'"}})
    EXPECT_EQ(shell_quoted(argument), quoted);
  if (std::system("command -v bash >/dev/null") != 0) GTEST_SKIP() << "no bash";
  std::string all;
  for (int byte = 1; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const std::string& argument : {all, std::string("'\\\x9b"), std::string("\n")}) {
    const std::string quoted = shell_quoted(argument);
    EXPECT_EQ(printable(quoted, kWholeText), quoted);
    const std::string command = "printf '%s' " + quoted + " | od -An -v -tu1";
    setenv("NVFP4_MOE_TEST_COMMAND", command.c_str(), 1);
    FILE* pipe = popen("bash -c \"$NVFP4_MOE_TEST_COMMAND\"", "r");
    ASSERT_NE(pipe, nullptr);
    std::string read;
    for (int byte = 0; fscanf(pipe, "%d", &byte) == 1;) read += static_cast<char>(byte);
    EXPECT_EQ(pclose(pipe), 0);
    EXPECT_EQ(read, argument) << command;
  }
  unsetenv("NVFP4_MOE_TEST_COMMAND");
}

// The item ends with two wide characters.
Progress half() {
  return {.what = "pack",
          .item = "layer 1 of a checkpoint with a long name \xE4\xB8\xAD\xE6\x96\x87",
          .done = 1,
          .total = 2,
          .done_bytes = 1 << 20,
          .total_bytes = 2 << 20,
          .elapsed_s = 1};
}

// The bar is dropped before any of the text, then the text is cut.
TEST(Progress, TextHasShareRateAndRemainingTimeAndFitsItsColumns) {
  const std::string text = progress_text(half(), 0), whole = fitted_progress_text(half(), 1000);
  EXPECT_THAT(text, testing::StartsWith("pack  50%  1/2  1.0 MiB/s  eta 1.0 s  layer 1 of a"));
  EXPECT_EQ(whole, progress_text(half(), 24));
  EXPECT_THAT(whole, HasSubstr("[############............]"));
  // All characters are ASCII except two, which take three bytes and two columns each.
  const int columns = static_cast<int>(whole.size()) - 2;
  EXPECT_EQ(fitted_progress_text(half(), columns), whole);
  for (int narrow = columns - 1; narrow >= 0; --narrow) {
    const std::string fitted = fitted_progress_text(half(), narrow);
    const bool is_whole = fitted.ends_with("\xE6\x96\x87");
    EXPECT_LE(fitted.size(), static_cast<size_t>(narrow) + (is_whole ? 2 : 1)) << fitted;
    EXPECT_TRUE(is_whole || fitted.ends_with(narrow > 1 ? ".." : narrow == 1 ? "." : "")) << fitted;
    EXPECT_TRUE(is_whole || fitted.find('[') == std::string::npos) << fitted;
  }
}

// Collects what a bar writes.
struct Written {
  std::mutex mutex;
  std::vector<std::string> writes;
  std::atomic<int> columns{200};

  ProgressStyle style(bool quiet, bool terminal, int period_ms) {
    return {quiet, terminal, std::chrono::milliseconds(period_ms),
            [this](std::string_view bytes) {
              const std::lock_guard lock(mutex);
              writes.emplace_back(bytes);
            },
            [this] { return columns.load(); }};
  }
  // All writes, once there are this many or after five seconds.
  std::vector<std::string> once(size_t least) {
    for (int i = 0;; ++i) {
      {
        const std::lock_guard lock(mutex);
        if (writes.size() >= least || i == 1000) return writes;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
};

// A loader that reports nothing within one item still shows that it is running.
TEST(Progress, HeartbeatsGoOnWhileTheOperationIsSilent) {
  Written written;
  ProgressBar bar(written.style(false, false, 10));
  EXPECT_TRUE(bar.callback()(half()));
  const std::vector<std::string> lines = written.once(2);
  ASSERT_GE(lines.size(), 2u) << "no second line without a second call";
  for (const std::string& line : lines) {
    EXPECT_THAT(line, HasSubstr("layer 1 of a checkpoint"));
    EXPECT_EQ(line.find_first_of("\x1b\r"), std::string::npos);
  }
}

// Each redraw queries the width again and never writes more than one line holds.
TEST(Progress, ATerminalLineIsRedrawnWithinItsWindowAndCleared) {
  Written written;
  {
    ProgressBar bar(written.style(false, true, 2));
    bar.callback()(half());
    const size_t before = written.once(2).size();
    written.columns = 30;
    ASSERT_GE(written.once(before + 3).size(), before + 3);
  }
  EXPECT_THAT(written.writes.front(), HasSubstr("[####"));
  EXPECT_EQ(written.writes.back(), "\r\x1b[K");
  const std::string& last = written.writes[written.writes.size() - 2];
  EXPECT_TRUE(last.starts_with("\r") && last.ends_with("\x1b[K")) << last;
  EXPECT_LE(last.size(), 29u + 4u) << last;
}

TEST(Progress, QuietAndShortOperationsSayNothing) {
  Written quiet, brief;
  {
    ProgressBar bar(quiet.style(true, true, 1)), other(brief.style(false, false, 60000));
    bar.callback()(half());
    other.callback()(half());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(quiet.writes.empty());
  EXPECT_TRUE(brief.writes.empty());
}

}  // namespace
}  // namespace nvfp4_moe::internal::cli
