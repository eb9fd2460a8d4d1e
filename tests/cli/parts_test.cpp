// Parts of the command line that need no process: parsing of lists, tables, progress.
#include <chrono>
#include <limits>
#include <mutex>
#include <thread>

#include "cli/console/console.h"
#include "cli/console/exit_code.h"
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

std::vector<int64_t> list(const std::string& text) {
  const auto parsed = parse_list(text);
  EXPECT_OK(parsed);
  return parsed.ok() ? *parsed : std::vector<int64_t>{};
}
std::vector<int64_t> sweep(const std::string& text) {
  const auto parsed = parse_sweep(text);
  EXPECT_OK(parsed);
  return parsed.ok() ? *parsed : std::vector<int64_t>{};
}

TEST(Lists, NumbersAndRangesAscendWithoutRepetition) {
  EXPECT_THAT(list("7"), ElementsAre(7));
  EXPECT_THAT(list("0,3,5-9"), ElementsAre(0, 3, 5, 6, 7, 8, 9));
  EXPECT_THAT(list("5-6,6,1"), ElementsAre(1, 5, 6));
}

TEST(Lists, RefuseWhatIsNoList) {
  for (const char* text : {"", ",", "1,", "a", "1-", "-1", "5-3", "1--3", "1 2", "0x3", "1.5",
                           "99999999999999999999", "0-9223372036854775807", "0-999999,2000000"}) {
    const auto parsed = parse_list(text);
    EXPECT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr(text)) << "the message names what was given";
  }
}

TEST(Lists, SweepsKeepTheirOrder) {
  EXPECT_THAT(sweep("1,8,64..512:x2"), ElementsAre(1, 8, 64, 128, 256, 512));
  EXPECT_THAT(sweep("512,1"), ElementsAre(512, 1));
  EXPECT_THAT(sweep("0..24:+8"), ElementsAre(0, 8, 16, 24));
  EXPECT_THAT(sweep("1..10"), ElementsAre(1, 2, 4, 8))
      << "ends at the last value that does not pass the end";
  EXPECT_THAT(sweep("3..3"), ElementsAre(3));
  // The last step before the largest number must not wrap around.
  EXPECT_THAT(sweep("4611686018427387904..9223372036854775807:x2"),
              ElementsAre(4611686018427387904));
  EXPECT_THAT(sweep("9223372036854775800..9223372036854775807:+100"),
              ElementsAre(9223372036854775800));
}

TEST(Lists, RefuseSweepsThatNeverEnd) {
  for (const char* text : {"0..8:x2", "1..8:x1", "1..8:x0", "1..8:+0", "8..1", "1..8:", "1..8:2",
                           "1..", "..8", "", "0..9223372036854775807:+1"}) {
    EXPECT_EQ(parse_sweep(text).status().code(), Code::kInvalidArgument) << text;
  }
}

TEST(Lists, Names) {
  EXPECT_THAT(*parse_names("cpu"), ElementsAre("cpu"));
  EXPECT_THAT(*parse_names("b,a:x,b"), ElementsAre("b", "a:x", "b"));
  for (const char* text : {"", ",", "a,", ",a", "a,,b"}) {
    EXPECT_EQ(parse_names(text).status().code(), Code::kInvalidArgument) << text;
  }
}

TEST(Lists, Sizes) {
  EXPECT_EQ(*parse_bytes("5GB"), 5'000'000'000u);
  EXPECT_EQ(*parse_bytes("4GiB"), 4ull << 30);
  EXPECT_EQ(*parse_bytes("1.5MiB"), 3u << 19);
  EXPECT_EQ(*parse_bytes("123"), 123u);
  EXPECT_EQ(*parse_bytes("123B"), 123u);
  for (const char* text : {"", "GB", "-1GB", "0", "5 GB", "nan", "inf", "1e30", "5Gb"}) {
    EXPECT_FALSE(parse_bytes(text).ok()) << text;
  }
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(3u << 19), "1.5 MiB");
  EXPECT_EQ(duration_text(2.04), "2.0 s");
  EXPECT_EQ(duration_text(125), "2:05");
  EXPECT_EQ(duration_text(3723), "1:02:03");
}

TEST(Lists, FirstAndCount) {
  EXPECT_EQ(*parse_first_count("16:8"), std::pair(int64_t{16}, int64_t{8}));
  for (const char* text : {"16", "16:", ":8", "1:2:3", "-1:2"})
    EXPECT_FALSE(parse_first_count(text).ok()) << text;
}

TEST(Lists, LayersAsText) {
  EXPECT_EQ(list_text({0, 1, 2, 5, 7, 8, 9}), "0-2,5,7-9");
  EXPECT_EQ(list_text({}), "");
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

TEST(Choices, NamesAreThoseOfTheContract) {
  MoeOptions options;
  NumericChoices choices;
  choices.activation_format = "bf16";
  choices.router_weight = "before_down";
  EXPECT_OK(choices.apply(options));
  EXPECT_EQ(options.activation_format, ActivationFormat::kBf16);
  EXPECT_EQ(options.router_weight, RouterWeight::kBeforeDown);
  choices.row_format = "fp8";
  const Status status = choices.apply(options);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("--row-format"));
}

TEST(Tables, AlignTextAndKeepValues) {
  Table table({{"name", "name", false}, {"median_us", "median us"}});
  table.add({cell("a"), cell(1234.5678, "{:.1f}")});
  table.add({cell("longer"), cell(2.0, "{:.1f}")});
  EXPECT_EQ(table.text(false),
            "| name   | median us |\n"
            "| ------ | --------: |\n"
            "| a      |    1234.6 |\n"
            "| longer |       2.0 |\n");
  EXPECT_EQ(table.json()[0]["median_us"].get<double>(), 1234.5678);
}

TEST(Tables, AColumnWithoutATitleIsForProgramsAlone) {
  Table table({{"name", "name", false}, {"bytes", ""}});
  table.add({cell("a"), cell(int64_t{7})});
  EXPECT_EQ(table.text(false), "| name |\n| ---- |\n| a    |\n");
  EXPECT_EQ(table.json()[0]["bytes"], 7);
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

TEST(Tables, NamesAreShownEscapedAndKeptWhole) {
  Table table({{"name", "name", false}});
  table.add({cell("x\n\x1b[31m")});
  table.add({{"\xC2\x9B", nullptr}});  // a cell that was not made by cell()
  EXPECT_EQ(table.text(false),
            "| name          |\n"
            "| ------------- |\n"
            "| x\\x0A\\x1B[31m |\n"
            "| \\xC2\\x9B      |\n");
  EXPECT_EQ(table.json()[0]["name"], "x\n\x1b[31m");
}

TEST(Tables, WhatIsNotANumberIsAWordInJson) {
  EXPECT_EQ(cell(std::numeric_limits<double>::infinity(), "{:.1f}").value, "inf");
  EXPECT_EQ(cell(std::numeric_limits<double>::quiet_NaN(), "{:.1f}").value, "nan");
}

TEST(Console, ReproLinesSurviveAShell) {
  EXPECT_EQ(shell_quoted("/a/b-c_d.safetensors"), "/a/b-c_d.safetensors");
  EXPECT_EQ(shell_quoted("a b"), "'a b'");
  EXPECT_EQ(shell_quoted("it's"), "'it'\\''s'");
  EXPECT_EQ(shell_quoted(""), "''");
  EXPECT_EQ(shell_quoted("$HOME"), "'$HOME'");
  EXPECT_EQ(shell_quoted("größe"), "'größe'");
  // Bytes that a terminal would act on, or that are not text, are written in octal, so that a digit
  // may follow.
  EXPECT_EQ(shell_quoted("a\x1b[31m"), "$'a\\033[31m'");
  EXPECT_EQ(shell_quoted("it's\\\n7"), "$'it\\'s\\\\\\0127'");
  EXPECT_EQ(shell_quoted("\xE2\x80\xAE\xFF"), "$'\\342\\200\\256\\377'");
}

// bash reads every byte but 0 back unchanged.
TEST(Console, ReproLinesAreReadBackByBash) {
  if (std::system("command -v bash >/dev/null") != 0) GTEST_SKIP() << "no bash";
  std::string all;
  for (int byte = 1; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const std::string& argument :
       {all, std::string("'\\\x9b"), std::string("\xE2\x80\x8B 1"), std::string("\n")}) {
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

TEST(ExitCodes, OnePerClass) {
  EXPECT_EQ(exit_code(Code::kOk), 0);
  EXPECT_EQ(exit_code(Code::kCheckFailed), 1);
  EXPECT_EQ(exit_code(Code::kInvalidArgument), 2);
  EXPECT_EQ(exit_code(Code::kUnsupported), 3);
  EXPECT_EQ(exit_code(Code::kBadInput), 4);
  EXPECT_EQ(exit_code(Code::kIo), 4);
}

struct Written {
  std::mutex mutex;
  std::string text;
  ProgressStyle style(bool quiet, bool terminal, int period_ms) {
    return {quiet,
            terminal,
            std::chrono::milliseconds(period_ms),
            [this](std::string_view bytes) {
              const std::lock_guard lock(mutex);
              text += bytes;
            },
            {}};
  }
  std::string now() {
    const std::lock_guard lock(mutex);
    return text;
  }
  bool comes(const std::string& words) {
    for (int i = 0; i < 1000 && now().find(words) == std::string::npos; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return now().find(words) != std::string::npos;
  }
};

Progress half() {
  return {.what = "pack",
          .item = "layer 1 expert 2",
          .done = 1,
          .total = 2,
          .done_bytes = 1 << 20,
          .total_bytes = 2 << 20,
          .elapsed_s = 1};
}

TEST(Progress, TextHasShareRateAndRemainingTime) {
  EXPECT_EQ(progress_text(half(), 0), "pack  50%  1/2  1.0 MiB/s  eta 1.0 s  layer 1 expert 2");
  EXPECT_THAT(progress_text(half(), 24), HasSubstr("[############............]"));
}

// A loader that reports nothing within one item still shows that it is running.
TEST(Progress, HeartbeatsGoOnWhileTheOperationIsSilent) {
  Written written;
  ProgressBar bar(written.style(false, false, 10));
  EXPECT_TRUE(bar.callback()(half()));
  EXPECT_TRUE(written.comes("layer 1 expert 2"));
  const int first = static_cast<int>(written.now().size());
  for (int i = 0; i < 1000 && static_cast<int>(written.now().size()) < 2 * first; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GE(static_cast<int>(written.now().size()), 2 * first)
      << "no second line without a second call";
  EXPECT_EQ(written.now().find('\x1b'), std::string::npos);
  EXPECT_EQ(written.now().find('\r'), std::string::npos);
}

TEST(Progress, ATerminalLineIsRedrawnAndCleared) {
  Written written;
  {
    ProgressBar bar(written.style(false, true, 5));
    bar.callback()(half());
    EXPECT_TRUE(written.comes("[####"));
    EXPECT_EQ(written.now().find('\n'), std::string::npos);
  }
  EXPECT_TRUE(written.now().ends_with("\r\x1b[K"));
}

TEST(Progress, QuietAndShortOperationsSayNothing) {
  Written quiet, brief;
  {
    ProgressBar bar(quiet.style(true, true, 1));
    bar.callback()(half());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ProgressBar other(brief.style(false, false, 60000));
    other.callback()(half());
  }
  EXPECT_EQ(quiet.now(), "");
  EXPECT_EQ(brief.now(), "");
}

}  // namespace
}  // namespace nvfp4_moe::internal::cli
