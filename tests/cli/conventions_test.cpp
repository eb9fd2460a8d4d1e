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

// A tiny checkpoint on disk, made once.
const std::string& sound_checkpoint() {
  static const TempDir dir;
  static const std::string path = dir.file("sound");
  static const Status made = CheckpointBuilder({.layers = 2}).write(path);
  EXPECT_OK(made);
  return path;
}

TEST(Conventions, DoctorPassesHere) {
  const ToolRun run = run_ok({"doctor"});
  for (const char* words : {"16/16", "256/256", "scale layout 128x4", "tiny layer W4A4",
                            "tiny layer W4A16", "tiny layer W4A8"}) {
    EXPECT_THAT(run.out, HasSubstr(words));
  }
  EXPECT_THAT(run.out, HasSubstr("repro     nvfp4-moe doctor\n"));
}

TEST(Conventions, JsonIsOneObjectWithASchema) {
  const std::string& dir = sound_checkpoint();
  const std::vector<std::vector<std::string>> commands = {{"doctor"},
                                                          {"inspect", dir},
                                                          {"explain", dir},
                                                          {"explain", "--shape", "A"},
                                                          {"verify", dir, "--tokens", "2"}};
  for (std::vector<std::string> words : commands) {
    words.insert(words.end(), {"--json", "--quiet"});
    const ToolRun run = run_ok(words);
    const nlohmann::json json = run.json();
    ASSERT_TRUE(json.is_object()) << words[0] << ": " << run.out;
    EXPECT_EQ(json["schema"], 1);
    EXPECT_EQ(json["verb"], words[0]);
    EXPECT_EQ(json["ok"], true);
    EXPECT_THAT(json["repro"].get<std::string>(), StartsWith("nvfp4-moe " + words[0]));
    EXPECT_EQ(count_lines(run.out), 1);
    EXPECT_EQ(run.err, "") << "nothing but progress belongs there";
  }
}

// `error` has words of the message if it does not name an option.
TEST(Conventions, UsageErrorsAreTwo) {
  const std::string& dir = sound_checkpoint();
  const struct {
    std::vector<std::string> words;
    std::string error = "";
  } commands[] = {
      {{}, "synthesize, got none (see nvfp4-moe --help)"},
      {{"inspekt", "dir"},
       "verb: expected one of inspect, quantize, calibrate, verify, run, bench, doctor, explain, "
       "synthesize, got \"inspekt\"; did you mean inspect? (see nvfp4-moe --help)"},
      {{"frobnicate"}, "got \"frobnicate\" (see nvfp4-moe --help)"},
      {{"inspect"}},
      {{"inspect", dir, "--no-such-option"}},
      {{"inspect", dir, "second"}, "inspect: expected no further argument, got \"second\" (see"},
      {{"inspect", dir, "--max-tokens", "many"}},
      {{"inspect", dir, "--layers", "5-3"}},
      {{"inspect", dir, "--layers", "999"}},
      {{"inspect", dir, "--backend", "no-such-backend"}},
      {{"inspect", dir, "--gpu-memory", "much"}},
      {{"doctor", "--threads", "-1"}},
      {{"explain"}},
      {{"explain", "--shape", "no-such-shape"}},
      {{"explain", dir, "--shape", "A"}},
      {{"explain", "--shape", "A", "--activation-format", "fp6"}},
      {{"explain", "--shape", "A", "--intermediate-slice", "0:8"}},
      {{"bench", "--shape", "A", "--tokens", "8..1"}},
      {{"bench", "--shape", "A", "--rounds", "0"}},
      {{"bench", "--shape", "A", "--activation-format", "nvfp4,"}},
      {{"bench", "--shape", "A", "--activation-format", "nvfp4,fp6"}},
      {{"bench", "--shape", "A", "--backend", "reference,,reference"}},
      {{"bench", "--shape", "A", "--backend", "reference,abacus"}},
      {{"run", dir}},
      {{"run", dir, "--layer", "0", "--input", "x"}},
      {{"run", "--replay", "x", "--input", "y"}},
      {{"run", dir, "--devise", "cpu"},
       "--devise: unknown option of run; did you mean --device? (see nvfp4-moe run"},
      {{"run", dir, "--tokns=5"}, "--tokns: unknown option of run; did you mean --tokens?"},
      {{"run", dir, "--frobnicate"}, "--frobnicate: unknown option of run (see"},
      {{"run", dir, "--tokens", "abc"}, "--tokens: "},
      {{"verify", dir, "--limit", "20"}},
      {{"verify", dir, "--expert-range", "7:2"}},
      {{"calibrate", dir}},
      {{"calibrate", dir, "--input", "x", "--random", "1"}},
      {{"quantize", dir}},
      {{"quantize", dir, "x", "--search", "min"},
       "--search: expected one of max, mse, sweep, got \"min\""},
      {{"quantize", dir, "x", "--format", "gguf"}},
      {{"quantize", dir, "x", "--max-shard-size", "0"}},
      {{"synthesize", "/proc/no", "--dtype", "U8"}},
  };
  for (const auto& [words, error] : commands) {
    const std::string shown = testing::PrintToString(words);
    const ToolRun plain = run_tool(words);
    EXPECT_EQ(plain.exit_code, 2) << shown << plain.err;
    EXPECT_EQ(plain.out, "") << shown;
    EXPECT_THAT(plain.err, AllOf(StartsWith("nvfp4-moe: error: "), HasSubstr(error))) << shown;
    EXPECT_EQ(count_lines(plain.err), 1) << shown << plain.err;
    const ToolRun json = run_tool(joined({words, {"--json"}}));
    EXPECT_EQ(json.exit_code, 2) << shown;
    EXPECT_EQ(json.json()["error"]["status"], "invalid_argument") << shown << json.out;
    EXPECT_EQ(count_lines(json.err), 1) << shown;
  }
  EXPECT_THAT(run_tool({"--json"}).err,
              HasSubstr("--json: unknown before a verb; verb: expected one of"));
}

TEST(Conventions, HelpAndVersionAreResults) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"--help"}, {"--version"}, {"inspect", "--help"}, {"run", "--help"}}) {
    const ToolRun run = run_ok(words);
    EXPECT_NE(run.out, "");
    EXPECT_EQ(run.err, "");
  }
  const std::string help = run_tool({"--help"}).out;
  for (const char* verb :
       {"inspect", "quantize", "calibrate", "verify", "run", "bench", "doctor", "explain"}) {
    EXPECT_THAT(help, HasSubstr(verb));
  }
}

TEST(Conventions, WhatCannotBeReadIsFour) {
  const TempDir dir;
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"inspect", dir.file("missing")},
                                             {"verify", dir.file("missing")},
                                             {"explain", dir.file("missing")},
                                             {"calibrate", dir.file("missing"), "--random", "1"},
                                             {"quantize", dir.file("missing"), dir.file("out")},
                                             {"run", dir.file("missing"), "--layer", "0", "--input",
                                              dir.file("x"), "--output", dir.file("y")},
                                             {"run", sound_checkpoint(), "--layer", "0", "--input",
                                              dir.file("x"), "--output", dir.file("y")},
                                             {"run", "--replay", dir.file("missing")}}) {
    const ToolRun run = run_tool(words);
    EXPECT_EQ(run.exit_code, 4) << testing::PrintToString(words) << run.err;
    EXPECT_EQ(count_lines(run.err), 1) << run.err;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_FALSE(std::filesystem::exists(dir.file("out") + "/config.json"));
}

TEST(Conventions, WhatNoBackendTakesIsThree) {
  // `fixed` needs a source for the power of two; plain swiglu has no limit to derive it from.
  TempDir dir;
  BuilderOptions options{.model_type = "qwen3_moe", .weight_only = true};
  ASSERT_OK(CheckpointBuilder(options).write(dir.file("weight_only")));
  const ToolRun run = run_tool({"explain", dir.file("weight_only"), "--activation-format", "nvfp4",
                                "--intermediate-scale", "fixed"});
  EXPECT_TRUE(run.exit_code == 2 || run.exit_code == 3) << run.out << run.err;
  EXPECT_EQ(count_lines(run.err), 1);
  // A family with an unsupported activation is declined by name.
  CheckpointBuilder situ(BuilderOptions{});
  situ.config()["model_type"] = "kimi_k3";
  ASSERT_OK(situ.write(dir.file("situ")));
  const ToolRun declined = run_tool({"inspect", dir.file("situ")});
  EXPECT_EQ(declined.exit_code, 3) << declined.err;
}

TEST(Conventions, PipedOutputHasNoEscapeCodes) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"doctor"}, {"inspect", sound_checkpoint()}}) {
    const ToolRun run = run_tool(words);
    EXPECT_THAT(run.out + run.err, Not(HasSubstr("\x1b")));
    EXPECT_THAT(run.out + run.err, Not(HasSubstr("\r")));
  }
}

TEST(Conventions, ATerminalGetsColourUnlessToldNot) {
  EXPECT_THAT(run_tool({"doctor"}, {}, Stdout::kTerminal).out, HasSubstr("\x1b[32m"));
  EXPECT_THAT(run_tool({"doctor"}, {{"NO_COLOR", "1"}}, Stdout::kTerminal).out,
              Not(HasSubstr("\x1b")));
}

TEST(Conventions, AReaderThatGoesAwayEndsNothing) {
  const ToolRun run = run_tool({"doctor", "--quiet"}, {}, Stdout::kClosedPipe);
  EXPECT_EQ(run.exit_code, 0) << "the verdict stands, and no signal killed the process";
  EXPECT_EQ(run.err, "");
}

TEST(Conventions, AFullDiskIsTold) {
  const ToolRun run = run_tool({"doctor", "--json"}, {}, Stdout::kFull);
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_THAT(run.err, HasSubstr("nvfp4-moe: error: stdout: No space left on device"));
}

TEST(Conventions, ReproIsTheCommandThatWasGiven) {
  const ToolRun run = run_tool({"inspect", sound_checkpoint(), "--layers", "0", "--max-tokens=64"});
  EXPECT_THAT(run.out, HasSubstr("repro     nvfp4-moe inspect " + sound_checkpoint() +
                                 " --layers 0 --max-tokens=64\n"));
}

TEST(Conventions, BackendIsTakenFromTheEnvironmentWhereTheOptionSaysAuto) {
  const ToolRun forced =
      run_tool({"explain", "--shape", "A", "--json"}, {{"NVFP4_MOE_BACKEND", "reference"}});
  EXPECT_EQ(forced.json()["backend"], "reference") << forced.out;
  const ToolRun wrong = run_tool({"explain", "--shape", "A"}, {{"NVFP4_MOE_BACKEND", "abacus"}});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("environment NVFP4_MOE_BACKEND: expected one of auto, "));
}

TEST(Conventions, ExplainRefusesOnlyWhatCannotRunTheLayer) {
  const nlohmann::json backends = json_of({"explain", "--shape", "A"})["backends"];
  const std::string text = run_tool({"explain", "--shape", "A"}).out;
  ASSERT_GT(backends.size(), 1u);
  for (const auto& row : backends) {
    const size_t at = text.find("| " + row["backend"].get<std::string>() + " ");
    ASSERT_NE(at, std::string::npos) << text;
    const std::string line = text.substr(at, text.find('\n', at) - at);
    const char* result = row["chosen"]      ? "| chosen "
                         : row["supported"] ? "| not chosen "
                                            : "| refused ";
    EXPECT_THAT(line, HasSubstr(result));
  }
}

TEST(Inspect, NamesFormatSizesAndFit) {
  const ToolRun run = run_ok({"inspect", sound_checkpoint(), "--json", "--gpu-memory", "80"});
  const nlohmann::json json = run.json();
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
