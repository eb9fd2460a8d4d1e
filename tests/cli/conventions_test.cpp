// Conventions of all verbs: exit codes, streams, JSON, colours, repro lines.
#include "cli/run_tool.h"
#include "safetensors/safetensors.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/hostile_safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

// A tiny checkpoint on disk, made once.
const std::string& sound_checkpoint() {
  static const TempDir dir;
  static const std::string path = dir.file("sound");
  static const Status made = CheckpointBuilder({.layers = 2}).write(path);
  EXPECT_OK(made);
  return path;
}

TEST(Conventions, DoctorPassesHere) {
  const ToolRun run = run_ok({"doctor", "--verbose"});
  for (const char* words :
       {"16/16", "256/256", "scale layout 128x4", "tiny layer W4A4", "tiny layer W4A16",
        "tiny layer W4A8", "repro     nvfp4-moe doctor --verbose\n"})
    EXPECT_THAT(run.out, HasSubstr(words));
}

TEST(Conventions, JsonIsOneObjectWithASchemaAndTextHasNoEscapeCodes) {
  const std::string& dir = sound_checkpoint();
  for (const Words& words : std::vector<Words>{{"doctor"},
                                               {"inspect", dir},
                                               {"explain", dir},
                                               {"explain", "--shape", "A"},
                                               {"verify", dir, "--tokens", "2"}}) {
    SCOPED_TRACE(words[0]);
    const ToolRun run = run_ok(joined({words, {"--json", "--quiet"}}));
    const nlohmann::json json = run.json();
    ASSERT_TRUE(json.is_object()) << run.out;
    EXPECT_EQ(json["schema"], 1);
    EXPECT_EQ(json["verb"], words[0]);
    EXPECT_EQ(json["ok"], true);
    EXPECT_THAT(json["repro"].get<std::string>(), StartsWith("nvfp4-moe " + words[0]));
    EXPECT_EQ(count_lines(run.out), 1);
    EXPECT_EQ(run.err, "") << "nothing but progress belongs there";
    const ToolRun text = run_ok(words);
    EXPECT_THAT(text.out + text.err, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\r"))));
  }
}

// `error` has words of the message if it does not name an option.
TEST(Conventions, UsageErrorsAreTwo) {
  const std::string& dir = sound_checkpoint();
  const struct {
    Words words;
    std::string error = "";
  } commands[] = {
      {{}, "completion, got none (see nvfp4-moe --help)"},
      {{"inspekt", "dir"},
       "verb: expected one of inspect, quantize, calibrate, verify, run, bench, doctor, explain, "
       "synthesize, completion, got \"inspekt\"; did you mean inspect? (see nvfp4-moe --help)"},
      {{"frobnicate"}, "got \"frobnicate\" (see nvfp4-moe --help)"},
      {{"isnpect"}, "did you mean inspect? (see"},
      {{"inspect"}},
      {{"inspect", dir, "second"}, "inspect: expected no further argument, got \"second\" (see"},
      {{"inspect", dir, "--layers", "999"}},
      {{"inspect", dir, "--backend", "no-such-backend"}},
      {{"doctor", "--threads", "-1"}},
      {{"inspect", dir, "--gpu-memory", "80,"}, "--gpu-memory: "},
      {{"inspect", dir, "--layers", "0-"}, "--layers: "},
      {{"explain", dir, "--layer", "999"}, "--layer: expected layers with experts"},
      {{"bench", "--shape", "A", "--tokens", "0..5"},
       "--tokens: \"0..5\": expected a first number above 0"},
      {{"explain"}},
      {{"explain", dir, "--shape", "A"}},
      {{"bench", "--shape", "A", "--rounds", "0"}},
      {{"bench", "--shape", "A", "--activation-format", "nvfp4,fp6"}},
      {{"run", dir}},
      {{"run", dir, "--layer", "0", "--input", "x"}},
      {{"run", "--replay", "x", "--input", "y"}},
      {{"run", dir, "--devise", "cpu"},
       "--devise: unknown option of run; did you mean --device? (see nvfp4-moe run"},
      {{"run", dir, "--tokens", "abc"}, "--tokens: "},
      {{"verify", dir, "--limit", "20"}},
      {{"calibrate", dir, "--input", "x", "--random", "1"}},
      {{"quantize", dir, "x", "--search", "min"},
       "--search: expected one of max, mse, sweep, got \"min\""},
      {{"quantize", dir, "x", "--max-shard-size", "0"}},
      {{"inspect", dir, "--gate-up-order", "sideways"},
       "--gate-up-order: expected one of gate_first, up_first, interleaved"},
      {{"synthesize", "/proc/no", "--dtype", "U8"}},
      {{"completion", "tcsh"}, "SHELL: expected one of bash, zsh, fish, got \"tcsh\" (see"},
  };
  for (const auto& [words, error] : commands) {
    SCOPED_TRACE(testing::PrintToString(words));
    const ToolRun plain = run_tool(words);
    EXPECT_EQ(plain.exit_code, 2) << plain.err;
    EXPECT_EQ(plain.out, "");
    EXPECT_THAT(plain.err, AllOf(StartsWith("nvfp4-moe: error: "), HasSubstr(error)));
    EXPECT_EQ(count_lines(plain.err), 1) << plain.err;
    const ToolRun json = run_tool(joined({words, {"--json"}}));
    EXPECT_EQ(json.exit_code, 2);
    EXPECT_EQ(json.json()["error"]["status"], "invalid_argument") << json.out;
    EXPECT_EQ(count_lines(json.err), 1);
  }
  EXPECT_THAT(run_tool({"--json"}).err,
              HasSubstr("--json: unknown before a verb; verb: expected one of"));
}

TEST(Conventions, HelpAndVersionAreResults) {
  for (const Words& words : std::vector<Words>{{"--help"}, {"--version"}, {"run", "--help"}}) {
    const ToolRun run = run_ok(words);
    EXPECT_THAT(run.out, HasSubstr(words.size() > 1 ? "--replay" : ""));
    EXPECT_NE(run.out, "");
    EXPECT_EQ(run.err, "");
  }
}

TEST(Conventions, WhatCannotBeReadIsFourAndWhatNoBackendTakesIsThree) {
  const TempDir dir;
  const std::string none = dir.file("missing");
  CheckpointBuilder declined(BuilderOptions{});  // by its name
  declined.config()["model_type"] = "muse_spark";
  ASSERT_OK(declined.write(dir.file("declined")));
  for (const auto& [code, words] : std::vector<std::pair<int, Words>>{
           {4, {"inspect", none}},
           {4, {"verify", none}},
           {4, {"explain", none}},
           {4, {"calibrate", none, "--random", "1", "--write", dir.file("out")}},
           {4, {"quantize", none, dir.file("out")}},
           {4, {"run", none, "--layer", "0", "--input", none, "--output", dir.file("y")}},
           {4,
            {"run", sound_checkpoint(), "--layer", "0", "--input", none, "--output",
             dir.file("y")}},
           {4, {"run", "--replay", none}},
           {3, {"inspect", dir.file("declined")}}}) {
    const ToolRun run = run_tool(words);
    EXPECT_EQ(run.exit_code, code) << testing::PrintToString(words) << run.err;
    EXPECT_EQ(count_lines(run.err), 1) << run.err;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_FALSE(std::filesystem::exists(dir.file("out")));
  EXPECT_THAT(run_tool({"inspect", "an-organization/a-model"}).err, HasSubstr("downloaded first"));
  EXPECT_THAT(run_tool({"inspect", sound_checkpoint() + "/config.json"}).err,
              HasSubstr("not a safetensors file"));
}

TEST(Conventions, ATerminalGetsColourUnlessToldNot) {
  EXPECT_THAT(run_tool({"doctor"}, {}, Stdout::kTerminal).out, HasSubstr("\x1b[32m"));
  EXPECT_THAT(run_tool({"doctor"}, {{"NO_COLOR", "1"}}, Stdout::kTerminal).out,
              Not(HasSubstr("\x1b")));
}

TEST(Conventions, AReaderThatGoesAwayEndsNothingAndAFullDiskIsTold) {
  const ToolRun away = run_tool({"doctor", "--quiet"}, {}, Stdout::kClosedPipe);
  EXPECT_EQ(away.exit_code, 0) << "the verdict stands, and no signal killed the process";
  EXPECT_EQ(away.err, "");
  for (const Words& words : {Words{"doctor", "--json"}, Words{"completion", "bash"}}) {
    const ToolRun full = run_tool(words, {}, Stdout::kFull);
    EXPECT_EQ(full.exit_code, 4);
    EXPECT_THAT(full.err, HasSubstr("nvfp4-moe: error: stdout: No space left on device"));
  }
}

TEST(Conventions, ReproIsTheCommandThatWasGiven) {
  const ToolRun run = run_tool({"inspect", sound_checkpoint(), "--layers", "0", "--max-tokens=64"});
  EXPECT_THAT(run.out, HasSubstr("repro     nvfp4-moe inspect " + sound_checkpoint() +
                                 " --layers 0 --max-tokens=64\n"));
}

// The environment is used unless the command line names something; nonsense in it is an error.
TEST(Conventions, BackendAndThreadsComeFromTheEnvironmentUnlessTheyAreNamed) {
  const nlohmann::json forced =
      json_of({"explain", "--shape", "A"}, {{"NVFP4_MOE_BACKEND", "reference"}});
  EXPECT_EQ(forced["backend"], "reference");
  const auto threads = [](const Words& more) {
    const Words words = {"bench", "--shape", "A", "--experts", "1", "--tokens",
                         "1",     "--runs",  "1", "--seconds", "0"};
    return json_of(joined({words, more}), {{"NVFP4_MOE_THREADS", "3"}})["host"]["threads"];
  };
  EXPECT_EQ(threads({}), 3);
  EXPECT_EQ(threads({"--threads", "2"}), 2);
  for (const auto& [name, value, text] :
       {std::tuple("NVFP4_MOE_BACKEND", "abacus", "NVFP4_MOE_BACKEND: expected one of auto, "),
        std::tuple("NVFP4_MOE_THREADS", "many",
                   "expected a number from 1 to 4096, got \"many\"")}) {
    const ToolRun wrong = run_tool({"explain", "--shape", "A"}, {{name, value}});
    EXPECT_EQ(wrong.exit_code, 2) << name;
    EXPECT_THAT(wrong.err, HasSubstr(text));
  }
}

TEST(Conventions, ExplainRefusesOnlyWhatCannotRunTheLayer) {
  const nlohmann::json backends = json_of({"explain", "--shape", "A"})["backends"];
  const std::string text = run_tool({"explain", "--shape", "A"}).out;
  ASSERT_GT(backends.size(), 1u);
  for (const auto& row : backends) {
    const size_t at = text.find("| " + row["backend"].get<std::string>() + " ");
    ASSERT_NE(at, std::string::npos) << text;
    EXPECT_THAT(text.substr(at, text.find('\n', at) - at),
                HasSubstr(row["chosen"]      ? "| chosen "
                          : row["supported"] ? "| not chosen "
                                             : "| refused "));
  }
}

TEST(Inspect, NamesFormatSizesAndFit) {
  const nlohmann::json json = json_of({"inspect", sound_checkpoint(), "--gpu-memory", "80"});
  EXPECT_EQ(json["family"], "deepseek_v4");
  EXPECT_EQ(json["num_experts"], 8);
  EXPECT_EQ(json["hidden_size"], 64);
  EXPECT_EQ(json["errors"], 0);
  ASSERT_EQ(json["layer_statistics"].size(), 2u);
  // 8 experts of three 64 x 32 matrices: half a byte a code, a sixteenth of a byte a scale.
  EXPECT_EQ(json["layer_statistics"][0]["codes_bytes"], 8 * 3 * 64 * 32 / 2);
  EXPECT_EQ(json["layer_statistics"][0]["scales_bytes"], 8 * 3 * 64 * 32 / 16);
  ASSERT_EQ(json["fit"].size(), 4u);
  EXPECT_EQ(json["fit"][0]["fits_80gb"], true);
  EXPECT_GT(json["fit"][0]["experts_bytes"], json["fit"][3]["experts_bytes"]);
}

ATTACK_TEST(kHostileFiles, Inspect, EveryHostileCheckpointIsFourWithOneLine) {
  EXPECT_GE(hostile_cases().size(), 50u);
  for (const HostileCase& hostile : hostile_cases()) {
    const TempDir dir;
    write_hostile_case(dir.path(), hostile);
    const ToolRun run = run_tool({"inspect", dir.path().string()});
    attacked();
    EXPECT_EQ(run.exit_code, 4) << hostile.name << ": " << run.err;
    EXPECT_EQ(run.out, "") << hostile.name;
    EXPECT_EQ(count_lines(run.err), 1) << hostile.name << ": " << run.err;
    EXPECT_THAT(run.err, StartsWith("nvfp4-moe: error: ")) << hostile.name;
    for (const char c : run.err)
      EXPECT_TRUE(c == '\n' || (c & 0x80) != 0 || c >= 0x20) << hostile.name;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
