// The tool finds faults planted in a checkpoint, names their place, and exits with 1.
#include "checkpoint/checkpoint.h"
#include "cli/run_tool.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using Words = std::vector<std::string>;

// The checkpoint is a legal file; only a comparison with the original detects the fault.
// tests/verify has the other faults. Without the original the values of weights and input scales
// cannot be checked, and the output reports that.
ATTACK_TEST(kPlantedFaults, PlantedFaults, VerifyAgainstTheOriginalNamesThePlace) {
  const TempDir dir;
  BuilderOptions options{.format = SourceFormat::kFloat};
  ASSERT_OK(CheckpointBuilder(options).write(dir.file("original")));
  options.format = SourceFormat::kModelOpt;
  CheckpointBuilder sound(options), planted(options);
  ASSERT_OK(sound.write(dir.file("sound")));
  const int64_t layer = sound.layers().back();
  planted.plant(Plant::kFlippedCode, layer, 3);
  ASSERT_OK(planted.write(dir.file("planted")));
  const auto words = [&](const char* model) -> Words {
    return {"verify", dir.file(model), "--against", dir.file("original"), "--tokens",
            "2",      "--quiet"};
  };
  run_ok(words("sound"));
  const ToolRun run = run_tool(words("planted"));
  attacked();
  ASSERT_EQ(run.exit_code, 1) << run.out << run.err;
  EXPECT_THAT(run.err, StartsWith("nvfp4-moe: check failed: "));
  EXPECT_EQ(count_lines(run.err), 1) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("FAIL"), HasSubstr("layer " + std::to_string(layer)),
                             HasSubstr("expert 3")));
  EXPECT_THAT(run.out,  // a row and a column
              testing::ContainsRegex(sound.tensor_name(layer, 3, "gate", "codes") +
                                     ".*\\([0-9]+, [0-9]+\\)"));
  // The untouched layer passes.
  const nlohmann::json json = run_tool(joined({words("planted"), {"--json"}})).json();
  EXPECT_EQ(json["ok"], false);
  EXPECT_EQ(json["failed_layers"], 1);
  for (const auto& check : json["checks"])
    EXPECT_TRUE(check["layer"] == layer || check["passed"] == true) << check;

  const nlohmann::json alone = json_of({"verify", dir.file("sound"), "--tokens", "4"})["unchecked"];
  ASSERT_EQ(alone.size(), 2u) << alone;
  EXPECT_EQ(alone[0]["what"], "weights");
  EXPECT_THAT(alone[0]["why"].get<std::string>(), HasSubstr("without --against ORIGINAL"));
  EXPECT_EQ(alone[1]["what"], "input_scale");
}

// A tensor that no format has: every verb names the option that decides, and accepts it.
ATTACK_TEST(kPlantedFaults, PlantedFindings, NameTheOptionThatDecides) {
  CheckpointBuilder planted({.model_type = "qwen3_moe", .format = SourceFormat::kFloat});
  planted.tensors()["model.layers.0.mlp.experts.output_scale"] = {
      DType::kF32, {1}, std::vector<uint8_t>(4)};
  const TempDir dir;
  const std::string in = dir.file("in");
  ASSERT_OK(planted.write(in));
  const ToolRun inspect = run_tool({"inspect", in, "--quiet", "--json"});
  EXPECT_EQ(inspect.exit_code, 1) << inspect.err;
  EXPECT_THAT(inspect.out, HasSubstr("--accept-tensor"));
  for (const Words& verb :
       std::vector<Words>{{"verify", in, "--tokens", "2", "--quiet"},
                          {"bench", in, "--layer", "0", "--tokens", "1", "--quiet"},
                          {"calibrate", in, "--random", "1", "--tokens", "2", "--quiet"},
                          {"quantize", in, dir.file("out"), "--quiet"}}) {
    SCOPED_TRACE(verb.front());
    const ToolRun refused = run_tool(verb);
    attacked();
    EXPECT_NE(refused.exit_code, 0);
    EXPECT_THAT(refused.out + refused.err, HasSubstr("model.layers.0.mlp.experts.output_scale"));
    run_ok(joined({verb, {"--accept-tensor", "*.other", "--accept-tensor", "*.output_scale"}}));
  }
}

// inspect exists for broken checkpoints: it reports their findings first, even if nothing else can
// be reported. An error that a finding causes in another verb names the finding: at the end of the
// line, and as a separate field in JSON.
ATTACK_TEST(kPlantedFaults, PlantedFindings, AreReportedByInspectAndNamedByTheErrorsTheyCause) {
  const std::tuple<Plant, SourceFormat, const char*> cases[] = {
      {Plant::kMissingExpert, SourceFormat::kModelOpt, "missing_expert"},
      {Plant::kMissingExpert, SourceFormat::kFloat, "missing_expert"},
      {Plant::kWrongShape, SourceFormat::kModelOpt, "shape_mismatch"},
      {Plant::kNanTensorScale, SourceFormat::kCompressedTensors, "tensor_scale_nonfinite"},
  };
  for (const auto& [fault, format, id] : cases) {
    SCOPED_TRACE(std::string(id) + " " + to_string(format));
    const TempDir dir;
    CheckpointBuilder builder({.format = format});
    builder.plant(fault, 1, 3);
    ASSERT_OK(builder.write(dir.file("model")));
    const ToolRun text = run_tool({"inspect", dir.file("model"), "--quiet"});
    attacked();
    EXPECT_EQ(text.exit_code, 1) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr(id), HasSubstr("1 error,")));
    EXPECT_THAT(text.err, StartsWith(std::string("nvfp4-moe: check failed: error ") + id +
                                     ": layer 1 expert 3 "));
    const nlohmann::json json =
        run_tool({"inspect", dir.file("model"), "--json", "--quiet"}).json();
    EXPECT_EQ(json["ok"], false);
    EXPECT_EQ(json["errors"], 1);
    EXPECT_TRUE(json["fit"].is_null());
    int found = 0;
    for (const auto& finding : json["findings"]) {
      found += finding["id"] == id && finding["layer"] == 1 && finding["expert"] == 3;
      EXPECT_TRUE(finding["examples"].is_array());
    }
    EXPECT_EQ(found, 1);
    if (format == SourceFormat::kFloat) continue;
    EXPECT_EQ(json["layer_statistics"].size(), 2u);
    const ToolRun bench = run_tool(
        {"bench", dir.file("model"), "--layer", "1", "--tokens", "1", "--quiet", "--json"});
    EXPECT_EQ(bench.exit_code, 4) << bench.out << bench.err;
    EXPECT_THAT(bench.err, EndsWith(std::string(" [") + id + "]\n"));
    EXPECT_EQ(bench.json()["error"]["status"], "bad_input");
    EXPECT_EQ(bench.json()["error"]["finding"], id);
  }
}

ATTACK_TEST(kHostileFiles, Inspect, SizesThatTheFilesDoNotHaveArePlannedForByNobody) {
  const TempDir dir;
  const std::string model = dir.file("model");
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["hidden_size"] = 1 << 20;
  ASSERT_OK(builder.write(model));
  for (const Words& words : std::vector<Words>{
           {"explain", model}, {"bench", model}, {"calibrate", model, "--random", "1"}}) {
    const ToolRun run = run_tool(words);
    attacked();
    EXPECT_EQ(run.exit_code, 4) << words[0] << run.out << run.err;
    EXPECT_THAT(run.err, HasSubstr("[shape_mismatch]")) << words[0];
  }
  EXPECT_EQ(run_tool({"inspect", model, "--quiet"}).exit_code, 1);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
