// verify finds what was planted in a checkpoint, says where, and exits 1.
#include "checkpoint/checkpoint.h"
#include "cli/run_tool.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct PlantedCase {
  Plant fault;
  const char* projection;  // "" where the whole layer is off
};

class PlantedFaults : public testing::TestWithParam<PlantedCase> {};

// The checkpoint is legal as a file; only the original knows that it is wrong.
ATTACK_TEST_P(kPlantedFaults, PlantedFaults, VerifyAgainstTheOriginalNamesThePlace) {
  const TempDir dir;
  BuilderOptions options;
  options.hidden_size = options.intermediate_size = 64;  // square, so that transposed scales keep a legal shape
  options.format = SourceFormat::kFloat;
  ASSERT_OK(CheckpointBuilder(options).write(dir.file("original")));
  options.format = SourceFormat::kModelOpt;
  CheckpointBuilder sound(options);
  const int64_t layer = sound.layers().back();
  ASSERT_OK(sound.write(dir.file("sound")));
  const ToolRun pass =
      run_tool({"verify", dir.file("sound"), "--against", dir.file("original"), "--tokens", "2", "--quiet"});
  ASSERT_EQ(pass.exit_code, 0) << pass.out << pass.err;

  CheckpointBuilder planted(options);
  planted.plant(GetParam().fault, layer, 3);
  ASSERT_OK(planted.write(dir.file("planted")));
  const ToolRun run =
      run_tool({"verify", dir.file("planted"), "--against", dir.file("original"), "--tokens", "2", "--quiet"});
  attacked();
  ASSERT_EQ(run.exit_code, 1) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("FAIL"));
  EXPECT_THAT(run.err, StartsWith("nvfp4-moe: check failed: "));
  EXPECT_EQ(count_lines(run.err), 1) << run.err;
  EXPECT_THAT(run.out + run.err, HasSubstr("layer " + std::to_string(layer)));
  if (*GetParam().projection != '\0') {
    EXPECT_THAT(run.out, HasSubstr("expert 3"));
    const std::string tensor = sound.tensor_name(layer, 3, GetParam().projection, "codes");
    EXPECT_THAT(run.out, HasSubstr(tensor));
    // A row and a column, "(12, 34)", unless the fault is one number that all weights share.
    if (GetParam().fault != Plant::kReciprocalTensorScale) {
      EXPECT_THAT(run.out, testing::ContainsRegex(tensor + ".*\\([0-9]+, [0-9]+\\)"));
    }
  }
  // The layer that nobody touched passes.
  const nlohmann::json json =
      run_tool({"verify", dir.file("planted"), "--against", dir.file("original"), "--tokens", "2", "--quiet", "--json"})
          .json();
  EXPECT_EQ(json["ok"], false);
  EXPECT_EQ(json["failed_layers"], 1);
  for (const auto& check : json["checks"]) {
    EXPECT_TRUE(check["layer"] == layer || check["passed"] == true) << check;
  }
}

// A tensor that no format has: every verb says which option decides, and takes it.
ATTACK_TEST(kPlantedFaults, PlantedFindings, NameTheOptionThatDecides) {
  CheckpointBuilder planted({.model_type = "qwen3_moe", .format = SourceFormat::kFloat});
  planted.tensors()["model.layers.0.mlp.experts.output_scale"] = {DType::kF32, {1}, std::vector<uint8_t>(4)};
  const TempDir dir;
  const std::string in = dir.file("in");
  ASSERT_OK(planted.write(in));
  const ToolRun inspect = run_tool({"inspect", in, "--quiet", "--json"});
  EXPECT_EQ(inspect.exit_code, 1) << inspect.err;
  EXPECT_THAT(inspect.out, HasSubstr("--accept-tensor"));
  const std::vector<std::vector<std::string>> verbs = {{"verify", in, "--tokens", "2"},
                                                       {"bench", in, "--layer", "0", "--tokens", "1"},
                                                       {"calibrate", in, "--random", "1", "--tokens", "2"},
                                                       {"quantize", in, dir.file("out")}};
  for (std::vector<std::string> verb : verbs) {
    SCOPED_TRACE(verb.front());
    verb.push_back("--quiet");
    const ToolRun refused = run_tool(verb);
    attacked();
    EXPECT_NE(refused.exit_code, 0);
    EXPECT_THAT(refused.out + refused.err, HasSubstr("model.layers.0.mlp.experts.output_scale"));
    verb.insert(verb.end(), {"--accept-tensor", "*.other", "--accept-tensor", "*.output_scale"});
    const ToolRun accepted = run_tool(verb);
    EXPECT_EQ(accepted.exit_code, 0) << accepted.out << accepted.err;
  }
  const ToolRun wrong = run_tool({"inspect", in, "--gate-up-order", "sideways"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--gate-up-order: expected one of gate_first, up_first, interleaved"));
}

// An error that a finding causes names it, at the end of the line and by itself in JSON.
ATTACK_TEST(kPlantedFaults, PlantedFindings, AreNamedByTheErrorTheyCause) {
  CheckpointBuilder planted({.format = SourceFormat::kModelOpt});
  const int64_t layer = planted.layers().back();
  planted.plant(Plant::kNanBlockScale, layer, 3);
  const TempDir dir;
  ASSERT_OK(planted.write(dir.file("planted")));
  const ToolRun run =
      run_tool({"bench", dir.file("planted"), "--layer", std::to_string(layer), "--tokens", "1", "--quiet", "--json"});
  attacked();
  EXPECT_EQ(run.exit_code, 4) << run.out << run.err;
  EXPECT_THAT(run.err, testing::EndsWith(" [block_scale_nan]\n"));
  EXPECT_EQ(run.json()["error"]["status"], "bad_input");
  EXPECT_EQ(run.json()["error"]["finding"], "block_scale_nan");
}

INSTANTIATE_TEST_SUITE_P(
    All, PlantedFaults,
    testing::Values(PlantedCase{Plant::kFlippedCode, "gate"}, PlantedCase{Plant::kScaleTimesTwo, "up"},
                    PlantedCase{Plant::kSwappedGateUp, "gate"}, PlantedCase{Plant::kTransposedScales, "down"},
                    PlantedCase{Plant::kReciprocalTensorScale, "down"}, PlantedCase{Plant::kShiftedExperts, ""}),
    [](const auto& parameter) {
      std::string name = to_string(parameter.param.fault);
      std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
      return name;
    });

// A broken checkpoint is what inspect is for: its findings come first, whatever else cannot be said of it.
ATTACK_TEST(kPlantedFaults, Inspect, BrokenCheckpointsAreReportedByTheirFindings) {
  const std::tuple<Plant, SourceFormat, const char*> cases[] = {
      {Plant::kMissingExpert, SourceFormat::kModelOpt, "missing_expert"},
      {Plant::kMissingExpert, SourceFormat::kFloat, "missing_expert"},
      {Plant::kWrongShape, SourceFormat::kModelOpt, "shape_mismatch"},
      {Plant::kWrongDtype, SourceFormat::kModelOpt, "dtype_mismatch"},
      {Plant::kNanTensorScale, SourceFormat::kCompressedTensors, "tensor_scale_nonfinite"},
  };
  for (const auto& [fault, format, id] : cases) {
    SCOPED_TRACE(std::string(id) + " " + to_string(format));
    const TempDir dir;
    BuilderOptions options;
    options.format = format;
    CheckpointBuilder builder(options);
    builder.plant(fault, 1, 3);
    ASSERT_OK(builder.write(dir.file("model")));
    const ToolRun text = run_tool({"inspect", dir.file("model"), "--quiet"});
    attacked();
    EXPECT_EQ(text.exit_code, 1) << text.err;
    EXPECT_THAT(text.out, HasSubstr(id));
    EXPECT_THAT(text.out, HasSubstr("1 error,"));
    EXPECT_THAT(text.err, StartsWith(std::string("nvfp4-moe: check failed: error ") + id + ": layer 1 expert 3 "));
    const nlohmann::json json = run_tool({"inspect", dir.file("model"), "--json", "--quiet"}).json();
    EXPECT_EQ(json["ok"], false);
    EXPECT_EQ(json["errors"], 1);
    EXPECT_TRUE(json["fit"].is_null());
    int found = 0;
    for (const auto& finding : json["findings"]) {
      found += finding["id"] == id && finding["layer"] == 1 && finding["expert"] == 3;
      EXPECT_TRUE(finding["examples"].is_array());
    }
    EXPECT_EQ(found, 1);
    if (format != SourceFormat::kFloat) {
      EXPECT_EQ(json["layer_statistics"].size(), 2u);
    }
  }
}

ATTACK_TEST(kHostileFiles, Inspect, SizesThatTheFilesDoNotHaveArePlannedForByNobody) {
  const TempDir dir;
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["hidden_size"] = 1 << 20;
  ASSERT_OK(builder.write(dir.file("model")));
  for (const char* verb : {"explain", "bench", "calibrate"}) {
    std::vector<std::string> words = {verb, dir.file("model")};
    if (verb == std::string("calibrate")) words.insert(words.end(), {"--random", "1"});
    const ToolRun run = run_tool(words);
    attacked();
    EXPECT_EQ(run.exit_code, 4) << verb << run.out << run.err;
    EXPECT_THAT(run.err, HasSubstr("[shape_mismatch]")) << verb;
  }
  EXPECT_EQ(run_tool({"inspect", dir.file("model"), "--quiet"}).exit_code, 1);
}

// Without the original nothing is known of the weights' and input scales' values, and the output says so.
TEST(Verify, NamesWhatItDidNotCheck) {
  const TempDir dir;
  ASSERT_OK(CheckpointBuilder({.format = SourceFormat::kModelOpt}).write(dir.file("sound")));
  const ToolRun alone = run_tool({"verify", dir.file("sound"), "--tokens", "4", "--json"});
  EXPECT_EQ(alone.exit_code, 0) << alone.err;
  const nlohmann::json unchecked = alone.json()["unchecked"];
  ASSERT_EQ(unchecked.size(), 2u) << unchecked;
  EXPECT_EQ(unchecked[0]["what"], "weights");
  EXPECT_THAT(unchecked[0]["why"].get<std::string>(), HasSubstr("without --against only illegal bytes are errors"));
  EXPECT_EQ(unchecked[1]["what"], "input_scale");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
