// The complete flow at tiny sizes: synthesize -> quantize -> inspect -> verify -> calibrate -> run
// -> dump -> replay.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <tuple>

#include "cli/run_tool.h"
#include "core/float_formats.h"
#include "safetensors/safetensors.h"
#include "support/checkpoint_builder.h"
#include "support/read_tensor.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int64_t kHidden = 128;

// A float checkpoint and its NVFP4 copy, made once by the tool itself.
struct Made {
  TempDir dir;
  std::string floats = dir.file("floats");
  std::string packed = dir.file("packed");
  Made() {
    run_ok({"synthesize", floats, "--layers", "2", "--experts", "8", "--top-k", "2", "--hidden",
            "128", "--intermediate", "64", "--vocab", "64"});
    const nlohmann::json quantized = json_of({"quantize", floats, packed, "--search", "mse"});
    quantize = quantized;
  }
  nlohmann::json quantize;
};
Made& made() {
  static Made value;
  return value;
}

// Five tokens: hidden in F32, ids over all experts with one -1, and weights; the caller may set the
// fifth token's.
void write_states(const std::string& path, float fifth_weight = 0.25f, int64_t channels = kHidden) {
  std::vector<float> hidden, weights;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 5 * channels; ++i)
    hidden.push_back(static_cast<float>((i * 37) % 101 - 50) / 16.0f);
  for (int64_t i = 0; i < 10; ++i) {
    ids.push_back(i == 7 ? -1 : (i * 3) % 8);
    weights.push_back(0.25f + 0.05f * static_cast<float>(i % 4));
  }
  weights[4] = fifth_weight;
  write_named_tensors(path, {tensor("hidden", DType::kF32, {5, channels}, hidden),
                             tensor("topk_ids", DType::kI64, {5, 2}, ids),
                             tensor("topk_weights", DType::kF32, {5, 2}, weights)});
}

std::vector<float> read_out(const std::string& path) {
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  EXPECT_OK(file);
  if (!file.ok()) return {};
  const TensorInfo* info = file->find("out");
  EXPECT_NE(info, nullptr);
  if (info == nullptr) return {};
  EXPECT_EQ(info->dtype, DType::kF32) << "hidden's dtype";
  EXPECT_EQ(info->shape, (std::vector<int64_t>{5, kHidden}));
  return read_tensor<float>(*file, *info);
}

TEST(Flow, QuantizeReportsQualityPerLayer) {
  const nlohmann::json& json = made().quantize;
  ASSERT_EQ(json["layers"].size(), 2u);
  EXPECT_EQ(json["quantized_tensors"], 2 * 8 * 3);
  for (const auto& layer : json["layers"]) {
    // 4.5 bits a weight give about 20 dB on bell-shaped weights; half of that would mean a broken
    // quantizer.
    EXPECT_GT(layer["sqnr_db"].get<double>(), 15.0);
    EXPECT_LT(layer["sqnr_db"].get<double>(), 30.0);
    EXPECT_EQ(layer["blocks"], 8 * 3 * 128 * 64 / 16);
  }
  EXPECT_LT(json["written_bytes"].get<int64_t>(), json["source_bytes"].get<int64_t>());
}

TEST(Flow, AFinishedCheckpointIsNotOverwritten) {
  const ToolRun again = run_tool({"quantize", made().floats, made().packed});
  EXPECT_EQ(again.exit_code, 2) << again.err;
  EXPECT_EQ(count_lines(again.err), 1);
}

TEST(Flow, InspectAndVerifyAgainstTheOriginalPass) {
  const ToolRun inspect = run_ok({"inspect", made().packed, "--json"});
  EXPECT_EQ(inspect.json()["errors"], 0);
  EXPECT_EQ(json_of({"inspect", made().floats})["format"], "float");

  const ToolRun verify =
      run_ok({"verify", made().packed, "--against", made().floats, "--tokens", "16"});
  EXPECT_THAT(verify.out, HasSubstr("file's bytes, unpacked"));
  EXPECT_THAT(verify.out, HasSubstr("exact reference, cpu"));
  EXPECT_THAT(verify.out, HasSubstr("original"));
  EXPECT_THAT(verify.out, HasSubstr("2 layers passed"));
  EXPECT_THAT(verify.out, HasSubstr("unchecked  input_scale: "));
  EXPECT_THAT(verify.out, Not(HasSubstr("unchecked  weights: ")));
}

TEST(Flow, AnSqnrLimitFailsOnlyWhenAsked) {
  const ToolRun strict = run_tool({"verify", made().packed, "--against", made().floats, "--tokens",
                                   "0", "--limit", "40", "--layers", "1"});
  EXPECT_EQ(strict.exit_code, 1) << strict.out;
  EXPECT_THAT(strict.out, HasSubstr("FAIL"));
  EXPECT_THAT(strict.out, HasSubstr("layer 1"));
  run_ok({"verify", made().packed, "--against", made().floats, "--tokens", "0", "--limit", "10"});
}

TEST(Flow, BothOutputFormatsAreReadBack) {
  const std::string out = made().dir.file("compressed");
  run_ok({"quantize", made().floats, out, "--format", "compressed-tensors", "--layers", "1",
          "--separate-gate-up"});
  run_ok({"verify", out, "--against", made().floats, "--layers", "1", "--tokens", "4"});
}

// Experts with two matrices, of the model's width and after a latent projection, through every
// verb.
TEST(Flow, NemotronGoesThroughEveryVerb) {
  TempDir dir;
  for (const char* latent : {"0", "96"}) {
    const std::string floats = dir.file(std::string("floats") + latent),
                      packed = dir.file(std::string("packed") + latent);
    run_ok({"synthesize", floats, "--family", "nemotron_h", "--latent", latent, "--layers", "2",
            "--experts", "8", "--top-k", "2", "--hidden", "128", "--intermediate", "64", "--vocab",
            "64"});
    const nlohmann::json quantized = json_of({"quantize", floats, packed, "--search", "mse"});
    const nlohmann::json layer = quantized["layers"][0];
    EXPECT_EQ(layer["layer"], 1);
    EXPECT_TRUE(layer["gate_sqnr_db"].is_null());
    EXPECT_EQ(layer["blocks"], 8 * 2 * (latent[0] == '0' ? 128 : 96) * 64 / 16);
    const nlohmann::json inspected = json_of({"inspect", packed});
    EXPECT_EQ(inspected["errors"], 0);
    EXPECT_EQ(inspected["activation"], "relu2");
    EXPECT_EQ(inspected["model_hidden_size"], 128);
    EXPECT_EQ(inspected["hidden_size"], latent[0] == '0' ? 128 : 96);
    const ToolRun verify = run_ok({"verify", packed, "--against", floats, "--tokens", "16"});
    EXPECT_THAT(verify.out, HasSubstr("2 layers passed"));
    const std::string calibrated = dir.file(std::string("calibrated") + latent);
    run_ok(
        {"calibrate", packed, "--random", "2", "--tokens", "16", "--write", calibrated, "--json"});
    run_ok({"verify", calibrated, "--activation-scale", "static", "--tokens", "8"});
    const nlohmann::json explained = json_of({"explain", packed, "--layer", "3"});
    EXPECT_EQ(explained["activation"], "relu2");
    const std::string states = dir.file(std::string("states") + latent),
                      dump = dir.file(std::string("dump") + latent);
    write_states(states, 0.25f, latent[0] == '0' ? 128 : 96);
    run_ok({"run", packed, "--layer", "3", "--input", states, "--output", dir.file("out"), "--dump",
            dump});
    run_ok({"run", "--replay", dump});
  }
  // Another model's weights are not accepted for the comparison.
  const ToolRun other =
      run_tool({"verify", dir.file("packed0"), "--against", made().floats, "--layers", "1"});
  EXPECT_NE(other.exit_code, 0);
}

TEST(Flow, CalibrationGoesIntoACopy) {
  const std::string out = made().dir.file("calibrated");
  const ToolRun calibrated = run_ok(
      {"calibrate", made().packed, "--random", "2", "--tokens", "16", "--write", out, "--json"});
  const nlohmann::json layer = calibrated.json()["layers"][0];
  EXPECT_GT(layer["hidden_amax"].get<double>(), 0.0);
  EXPECT_FLOAT_EQ(layer["hidden_scale"].get<float>(), layer["hidden_amax"].get<float>() / 2688.0f);
  // The loader finds the values that were written.
  const nlohmann::json found = json_of({"explain", out, "--activation-scale", "static"});
  const auto used = found["activation_scale"]["hidden"].get<double>();
  EXPECT_GE(used, layer["hidden_scale"].get<double>());
  EXPECT_LT(used, 2 * layer["hidden_scale"].get<double>()) << "rounded up to a power of two";
  run_ok({"verify", out, "--activation-scale", "static", "--tokens", "8"});

  // The same numbers at quantization.
  const std::string scales = made().dir.file("scales.json");
  std::ofstream(scales) << calibrated.out;
  const std::string second = made().dir.file("second");
  run_ok({"quantize", made().floats, second, "--input-scales", scales});
  const nlohmann::json same = json_of({"explain", second, "--activation-scale", "static"});
  EXPECT_EQ(same["activation_scale"], found["activation_scale"]);
  const auto refused = [&](const std::string& file, const std::string& words) {
    const ToolRun run =
        run_tool({"quantize", made().floats, made().dir.file("third"), "--input-scales", file});
    EXPECT_EQ(run.exit_code, 4);
    EXPECT_THAT(run.err, testing::HasSubstr(file + ": " + words));
    EXPECT_FALSE(std::filesystem::exists(made().dir.file("third")));
  };
  std::ofstream(scales) << "{\"layers\": [{\"layer\": 0}]}";
  refused(scales, "layer 0: expected hidden_scale, got none");
  std::ofstream(scales)
      << R"({"layers": [{"layer": 0, "hidden_scale": 1, "intermediate_scale": null}]})";
  refused(scales, "expected scales of all ");
  refused("/dev/zero", "expected a regular file, got a character device");
}

TEST(Flow, MomentsOfCalibrateWeighTheErrorsOfQuantize) {
  const std::string moments = made().dir.file("moments.safetensors"),
                    out = made().dir.file("weighted");
  const nlohmann::json calibrated =
      json_of({"calibrate", made().floats, "--random", "1", "--moments", moments});
  EXPECT_EQ(calibrated["moments"], moments);
  EXPECT_EQ(run_tool({"calibrate", made().floats, "--random", "1", "--moments", moments}).exit_code,
            2);
  const ToolRun quantized = run_ok(
      {"quantize", made().floats, out, "--search", "sweep", "--calibration", moments, "--json"});
  EXPECT_EQ(quantized.json()["calibration"], moments);
  // SQNR is measured on weights, for which a plain sweep is best.
  const ToolRun sweep = run_tool(
      {"quantize", made().floats, made().dir.file("sweep"), "--search", "sweep", "--json"});
  EXPECT_LT(quantized.json()["mean_sqnr_db"].get<double>(),
            sweep.json()["mean_sqnr_db"].get<double>());
  EXPECT_GT(sweep.json()["mean_sqnr_db"].get<double>(),
            made().quantize["mean_sqnr_db"].get<double>());
  for (const std::string& checked : {out, made().dir.file("sweep")}) {
    run_ok({"verify", checked, "--against", made().floats, "--tokens", "4"});
  }
}

TEST(Flow, RunTellsWeightsAndOutputsThatAreNotFinite) {
  const std::string states = made().dir.file("nonfinite.safetensors"),
                    out = made().dir.file("nonfinite_out");
  const std::string dump = made().dir.file("nonfinite_dump");
  const std::vector<std::string> words = {"run",     made().packed, "--layer",  "1",
                                          "--input", states,        "--output", out};
  const auto run = [&](const std::string& option, const std::string& value = {}) {
    std::vector<std::string> all = words;
    if (!option.empty()) all.push_back(option);
    if (!value.empty()) all.push_back(value);
    return run_tool(all);
  };
  write_states(states);
  const nlohmann::json clean = run("--json").json();
  EXPECT_EQ(clean["nonfinite_weights"], 0);
  EXPECT_EQ(clean["nonfinite_outputs"], 0);
  EXPECT_THAT(run("").out, Not(HasSubstr("not finite")));

  write_states(states, std::numeric_limits<float>::quiet_NaN());
  const ToolRun text = run("--dump", dump);
  EXPECT_THAT(text.out, HasSubstr("1 router weights are not finite"));
  EXPECT_THAT(text.out, HasSubstr(std::to_string(kHidden) + " elements of out are not finite\n"));
  EXPECT_EQ(run("--json").json()["nonfinite_weights"], 1);
  EXPECT_EQ(run("--json").json()["nonfinite_outputs"], kHidden);
  const nlohmann::json replay = json_of({"run", "--replay", dump});
  EXPECT_EQ(replay["nonfinite_weights"], 1);
  EXPECT_EQ(replay["nonfinite_outputs"], kHidden);

  write_states(states, std::numeric_limits<float>::max());  // finite, but products overflow
  EXPECT_THAT(
      run("").out,
      HasSubstr("elements of out are not finite, by overflow: hidden and router weights are"));
}

TEST(Flow, RunDumpReplay) {
  const std::string states = made().dir.file("states.safetensors"),
                    out = made().dir.file("out.safetensors");
  const std::string dump = made().dir.file("dump.safetensors");
  write_states(states);
  const ToolRun run = run_ok(
      {"run", made().packed, "--layer", "1", "--input", states, "--output", out, "--dump", dump});
  EXPECT_THAT(run.out, HasSubstr("nvfp4-moe run --replay " + dump));
  double sum = 0;
  for (const float value : read_out(out)) {
    ASSERT_TRUE(std::isfinite(value));
    sum += std::abs(value);
  }
  EXPECT_GT(sum, 0.0);
  const nlohmann::json times =
      json_of({"run", made().packed, "--layer", "1", "--input", states, "--output", out});
  EXPECT_GT(times["elapsed_us"], 0.0);
  EXPECT_GE(times["repeats"], 1) << "a layer of this size takes far less than a second";
  EXPECT_GT(times["again_us"], 0.0);

  const ToolRun replay = run_ok({"run", "--replay", dump, "--json"});
  EXPECT_EQ(replay.json()["same_bits"], true);
  run_ok({"run", "--replay", dump, "--backend", "reference"});

  // A stored output that differs from this call's must be detected.
  const Result<SafetensorsFile> file = SafetensorsFile::open(dump);
  ASSERT_OK(file);
  const TensorInfo* stored = file->find("output");
  ASSERT_NE(stored, nullptr);
  {
    std::fstream edit(dump, std::ios::in | std::ios::out | std::ios::binary);
    edit.seekp(static_cast<std::streamoff>(file->header().data_offset + stored->begin +
                                           3 * kHidden * sizeof(float)));
    const float wrong = 1000.0f;
    edit.write(reinterpret_cast<const char*>(&wrong), sizeof wrong);
  }
  const ToolRun changed = run_tool({"run", "--replay", dump});
  EXPECT_EQ(changed.exit_code, 1) << changed.out;
  EXPECT_THAT(changed.out, HasSubstr("(3, 0)")) << "token and channel of the change";
  EXPECT_THAT(changed.out, HasSubstr("FAIL"));
}

// Ranks under expert and tensor parallel add up to the whole layer. No shared expert: every rank
// would add it.
TEST(Flow, RanksAddUp) {
  const TempDir dir;
  BuilderOptions options{
      .model_type = "qwen3_moe", .hidden_size = kHidden, .intermediate_size = 64};
  ASSERT_OK(CheckpointBuilder(options).write(dir.file("model")));
  const std::string states = dir.file("states.safetensors"), out = dir.file("out.safetensors");
  write_states(states);
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"run",  dir.file("model"), "--layer", "0", "--input",
                                      states, "--output",        out};
    words.insert(words.end(), {"--activation-format", "bf16", "--row-format", "fp32"});
    words.insert(words.end(), more.begin(), more.end());
    run_ok(words);
    return read_out(out);
  };
  const std::vector<float> whole = run({});
  for (const auto& [option, low, high] : {std::tuple("--expert-range", "0:3", "3:5"),
                                          std::tuple("--intermediate-slice", "0:32", "32:32")}) {
    const std::vector<float> first = run({option, low}), second = run({option, high});
    double error = 0, norm = 0, part = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      error += std::pow(first[i] + second[i] - whole[i], 2);
      norm += std::pow(whole[i], 2);
      part += std::pow(first[i], 2);
    }
    EXPECT_GT(part, 0.0) << option;
    EXPECT_GT(std::abs(part - norm), 1e-3 * norm) << option << ": one rank alone is not the layer";
    // Rows stay in fp32, so only the order of fp32 additions differs: fewer than 100 of them, 2^-24
    // each, and the terms are at most a few times the sum.
    EXPECT_LT(std::sqrt(error / norm), 100 * 0x1p-24 * 4) << option;
  }
}

TEST(Flow, RunRefusesInputsThatDoNotFit) {
  const std::string states = made().dir.file("wrong.safetensors");
  const auto run = [&] {
    return run_tool({"run", made().packed, "--layer", "0", "--input", states, "--output",
                     made().dir.file("no")});
  };
  write_named_tensors(states, {tensor("hidden", DType::kF32, {2, 64}, std::vector<float>(128))});
  EXPECT_EQ(run().exit_code, 4);
  EXPECT_THAT(run().err, HasSubstr("128"));
  write_named_tensors(
      states, {tensor("hidden", DType::kI32, {2, kHidden}, std::vector<int32_t>(2 * kHidden))});
  EXPECT_EQ(run().exit_code, 4);
  write_named_tensors(states,
                      {tensor("hidden", DType::kF32, {1, kHidden}, std::vector<float>(kHidden)),
                       tensor("topk_ids", DType::kI32, {1, 2}, std::vector<int32_t>{0, 8})});
  EXPECT_EQ(run().exit_code, 4) << "there is no expert 8";
  EXPECT_FALSE(std::filesystem::exists(made().dir.file("no")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
