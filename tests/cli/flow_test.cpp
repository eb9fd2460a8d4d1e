// The complete flow at tiny sizes: synthesize -> quantize -> inspect -> verify -> calibrate -> run
// -> dump -> replay.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "cli/run_tool.h"
#include "core/float_formats.h"
#include "safetensors/safetensors.h"
#include "support/checkpoint_builder.h"
#include "support/read_tensor.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::Not;
using Words = std::vector<std::string>;

constexpr int64_t kHidden = 128;

Words synthesize(const std::string& path, const Words& more = {}) {
  return joined({{"synthesize", path, "--layers", "2", "--experts", "8", "--top-k", "2", "--hidden",
                  "128", "--intermediate", "64", "--vocab", "64"},
                 more});
}

// A float checkpoint and its NVFP4 copy, made once by the tool itself.
struct Made {
  TempDir dir;
  std::string floats = dir.file("floats"), packed = dir.file("packed");
  nlohmann::json quantize;
  Made() {
    run_ok(synthesize(floats));
    quantize = json_of({"quantize", floats, packed, "--search", "mse"});
  }
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
  const auto file = must(SafetensorsFile::open(path));
  const TensorInfo* info = file->find("out");
  EXPECT_NE(info, nullptr);
  if (info == nullptr) return {};
  EXPECT_EQ(info->dtype, DType::kF32) << "hidden's dtype";
  EXPECT_EQ(info->shape, (std::vector<int64_t>{5, kHidden}));
  return read_tensor<float>(*file, *info);
}

TEST(Flow, QuantizeReportsQualityPerLayerAndOverwritesNothing) {
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
  EXPECT_EQ(run_tool({"quantize", made().floats, made().packed}).exit_code, 2);
}

TEST(Flow, InspectAndVerifyAgainstTheOriginalPass) {
  EXPECT_EQ(json_of({"inspect", made().packed})["errors"], 0);
  EXPECT_EQ(json_of({"inspect", made().floats})["format"], "float");
  const Words against = {"verify", made().packed, "--against", made().floats, "--tokens"};
  const ToolRun verify = run_ok(joined({against, {"16"}}));
  for (const char* words : {"file's bytes, unpacked", "exact reference, cpu", "original",
                            "2 layers passed", "unchecked  input_scale: "})
    EXPECT_THAT(verify.out, HasSubstr(words));
  EXPECT_THAT(verify.out, Not(HasSubstr("unchecked  weights: ")));
  // An SQNR limit fails only when it is asked for.
  const ToolRun strict = run_tool(joined({against, {"0", "--limit", "40", "--layers", "1"}}));
  EXPECT_EQ(strict.exit_code, 1) << strict.out;
  EXPECT_THAT(strict.out, AllOf(HasSubstr("FAIL"), HasSubstr("layer 1")));
  run_ok(joined({against, {"0", "--limit", "10"}}));
}

TEST(Flow, BothOutputFormatsAreReadBack) {
  const std::string out = made().dir.file("compressed");
  run_ok({"quantize", made().floats, out, "--format", "compressed-tensors", "--layers", "1",
          "--separate-gate-up"});
  run_ok({"verify", out, "--against", made().floats, "--layers", "1", "--tokens", "4"});
}

// Experts with two matrices, after a latent projection, through every verb.
TEST(Flow, NemotronGoesThroughEveryVerb) {
  const TempDir dir;
  const std::string floats = dir.file("floats"), packed = dir.file("packed"),
                    calibrated = dir.file("calibrated"), states = dir.file("states"),
                    dump = dir.file("dump");
  run_ok(synthesize(floats, {"--family", "nemotron_h", "--latent", "96"}));
  const nlohmann::json layer = json_of({"quantize", floats, packed})["layers"][0];
  EXPECT_EQ(layer["layer"], 1);
  EXPECT_TRUE(layer["gate_sqnr_db"].is_null());
  EXPECT_EQ(layer["blocks"], 8 * 2 * 96 * 64 / 16);
  const nlohmann::json inspected = json_of({"inspect", packed});
  EXPECT_EQ(inspected["errors"], 0);
  EXPECT_EQ(inspected["activation"], "relu2");
  EXPECT_EQ(inspected["model_hidden_size"], 128);
  EXPECT_EQ(inspected["hidden_size"], 96);
  EXPECT_THAT(run_ok({"verify", packed, "--against", floats, "--tokens", "16"}).out,
              HasSubstr("2 layers passed"));
  run_ok({"calibrate", packed, "--random", "2", "--tokens", "16", "--write", calibrated});
  run_ok({"verify", calibrated, "--activation-scale", "static", "--tokens", "8"});
  EXPECT_EQ(json_of({"explain", packed, "--layer", "3"})["activation"], "relu2");
  write_states(states, 0.25f, 96);
  run_ok({"run", packed, "--layer", "3", "--input", states, "--output", dir.file("out"), "--dump",
          dump});
  run_ok({"run", "--replay", dump});
  // Another model's weights are not accepted for the comparison.
  EXPECT_NE(run_tool({"verify", packed, "--against", made().floats, "--layers", "1"}).exit_code, 0);
}

TEST(Flow, CalibrationGoesIntoACopy) {
  const std::string out = made().dir.file("calibrated"), second = made().dir.file("second"),
                    third = made().dir.file("third"), scales = made().dir.file("scales.json");
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
  std::ofstream(scales) << calibrated.out;
  run_ok({"quantize", made().floats, second, "--input-scales", scales});
  const nlohmann::json same = json_of({"explain", second, "--activation-scale", "static"});
  EXPECT_EQ(same["activation_scale"], found["activation_scale"]);
  const auto refused = [&](const std::string& file, const std::string& words) {
    const ToolRun run = run_tool({"quantize", made().floats, third, "--input-scales", file});
    EXPECT_EQ(run.exit_code, 4);
    EXPECT_THAT(run.err, HasSubstr(file + ": " + words));
    EXPECT_FALSE(std::filesystem::exists(third));
  };
  std::ofstream(scales) << R"({"layers": [{"layer": 0}]})";
  refused(scales, "layer 0: expected hidden_scale, got none");
  std::ofstream(scales)
      << R"({"layers": [{"layer": 0, "hidden_scale": 1, "intermediate_scale": null}]})";
  refused(scales, "layer 1: expected scales of all ");
  refused("/dev/zero", "expected a regular file, got a character device");
}

TEST(Flow, MomentsOfCalibrateWeighTheErrorsOfQuantize) {
  const std::string moments = made().dir.file("moments.safetensors"),
                    out = made().dir.file("weighted"), sweep = made().dir.file("sweep");
  const Words calibrate = {"calibrate", made().floats, "--random", "1", "--moments", moments};
  EXPECT_EQ(json_of(calibrate)["moments"], moments);
  EXPECT_EQ(run_tool(calibrate).exit_code, 2) << "it exists";
  const nlohmann::json weighted =
      json_of({"quantize", made().floats, out, "--search", "sweep", "--calibration", moments});
  EXPECT_EQ(weighted["calibration"], moments);
  // SQNR is measured on weights, for which a plain sweep is best.
  const nlohmann::json plain = json_of({"quantize", made().floats, sweep, "--search", "sweep"});
  EXPECT_LT(weighted["mean_sqnr_db"], plain["mean_sqnr_db"]);
  EXPECT_GT(plain["mean_sqnr_db"], made().quantize["mean_sqnr_db"]);
  for (const std::string& checked : {out, sweep})
    run_ok({"verify", checked, "--against", made().floats, "--tokens", "4"});
}

TEST(Flow, CalibrateAndRunTellOfRoutingThatWasDrawn) {
  const std::string routed = made().dir.file("routed_states"),
                    bare = made().dir.file("bare_states"),
                    after = made().dir.file("weights_after_down");
  write_states(routed);
  write_named_tensors(
      bare, {tensor("hidden", DType::kF32, {2, kHidden}, std::vector<float>(2 * kHidden, 0.5f))});
  const char* const drawn = "no topk_ids for 2 of 2 layers, so their experts were drawn";
  EXPECT_THAT(run_ok({"calibrate", made().packed, "--input", bare}).out, HasSubstr(drawn));
  EXPECT_THAT(run_ok({"calibrate", made().packed, "--input", routed}).out, Not(HasSubstr(drawn)));

  // DeepSeek-V4 multiplies by router weights before down, so they change what is measured there.
  const char* const weights =
      "no topk_weights for 2 of 2 layers, so they were drawn from the seed: with router weight "
      "before_down, moments and scales are not";
  EXPECT_THAT(run_ok({"calibrate", made().packed, "--input", bare}).out, HasSubstr(weights));
  EXPECT_THAT(run_ok({"calibrate", made().packed, "--input", routed}).out,
              Not(HasSubstr("topk_weights")));
  run_ok(synthesize(after, {"--family", "qwen3_moe"}));
  EXPECT_THAT(run_ok({"calibrate", after, "--input", bare}).out, Not(HasSubstr("topk_weights")));

  const Words run = {
      "run", made().packed, "--layer", "0", "--output", made().dir.file("drawn_out"), "--input"};
  EXPECT_THAT(run_ok(joined({run, {bare}})).out,
              HasSubstr(", topk_ids drawn from the seed, topk_weights drawn from the seed"));
  EXPECT_THAT(run_ok(joined({run, {routed}})).out, Not(HasSubstr("drawn from the seed")));
}

TEST(Flow, LayersWithoutTokensAreNotMeasured) {
  const std::string states = made().dir.file("no_tokens"), scales = made().dir.file("no_scales");
  const std::vector<int64_t> nobody(2 * 2, -1), somebody = {0, 1, 2, 3};
  const std::vector<float> hidden(2 * kHidden, 0.5f), weights(2 * 2, 0.5f);
  std::vector<NamedTensor> tensors;
  for (const int layer : {0, 1}) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    tensors.push_back(tensor(prefix + "hidden", DType::kF32, {2, kHidden}, hidden));
    tensors.push_back(
        tensor(prefix + "topk_ids", DType::kI64, {2, 2}, layer == 0 ? nobody : somebody));
    tensors.push_back(tensor(prefix + "topk_weights", DType::kF32, {2, 2}, weights));
  }
  write_named_tensors(states, tensors);
  const nlohmann::json measured = json_of({"calibrate", made().floats, "--input", states});
  EXPECT_TRUE(measured["layers"][0]["hidden_scale"].is_null());
  EXPECT_TRUE(measured["layers"][1]["hidden_scale"].is_number());
  EXPECT_THAT(measured["notes"].dump(), HasSubstr("1 of 2 layers have no token with an expert"));
  std::ofstream(scales) << measured;
  EXPECT_THAT(run_ok({"quantize", made().floats, made().dir.file("half_measured"), "--search",
                      "max", "--input-scales", scales})
                  .out,
              HasSubstr("input_scale is 1.0 in 1 of 2 layers: not measured"));
  EXPECT_EQ(run_tool({"calibrate", made().packed, "--layers", "0", "--input", states, "--write",
                      made().dir.file("not_written")})
                .exit_code,
            4);
}

TEST(Flow, TheNextCommandReadsAsThisOneDid) {
  const std::string unknown = made().dir.file("unknown"), out = made().dir.file("unknown_nvfp4");
  std::filesystem::copy(made().floats, unknown);
  const auto path = std::filesystem::path(unknown) / "config.json";
  nlohmann::json config = nlohmann::json::parse(std::ifstream(path));
  const std::string family = config["model_type"];
  config["model_type"] = "some_new_moe";
  std::ofstream(path) << config;
  const std::string printed = run_ok({"quantize", unknown, out, "--family", family}).out;
  EXPECT_THAT(printed, HasSubstr(" --against " + unknown + " --family " + family));
  run_ok({"verify", out, "--against", unknown, "--family", family, "--tokens", "2"});
}

TEST(Flow, CodedBlockScalesAreShownAndVerified) {
  const std::string out = made().dir.file("coded");
  const nlohmann::json quantized =
      json_of({"quantize", made().floats, out, "--search", "mse", "--scale-coding", "csf"});
  EXPECT_EQ(quantized["scale_coding"], "csf");
  EXPECT_EQ(made().quantize["scale_coding"], "plain");
  const nlohmann::json plain = json_of({"inspect", made().packed});
  EXPECT_EQ(plain["scale_coding"], "plain");
  EXPECT_FALSE(plain.contains("csf"));
  const nlohmann::json coded = json_of({"inspect", out});
  EXPECT_EQ(coded["scale_coding"], "csf");
  uint64_t files = 0, decoded = 0;
  for (size_t layer = 0; layer < 2; ++layer) {
    files += coded["layer_statistics"][layer]["scales_bytes"].get<uint64_t>();
    decoded += plain["layer_statistics"][layer]["scales_bytes"].get<uint64_t>();
  }
  EXPECT_EQ(coded["csf"]["scales_bytes"], files);
  EXPECT_EQ(coded["csf"]["decoded_scales_bytes"], decoded);
  EXPECT_LT(files, decoded);
  EXPECT_THAT(run_ok({"inspect", out}).out, HasSubstr("coded as CSF: "));
  run_ok({"verify", out, "--against", made().floats, "--tokens", "4"});
  const std::string states = made().dir.file("coded_states.safetensors");
  write_states(states);
  std::vector<std::vector<float>> outputs;
  for (const std::string& model : {out, made().packed}) {
    const std::string output = model + "_out.safetensors";
    run_ok({"run", model, "--layer", "1", "--input", states, "--output", output});
    outputs.push_back(read_out(output));
  }
  EXPECT_EQ(outputs[0], outputs[1]) << "a layer has the same bits";
  EXPECT_EQ(run_tool({"quantize", made().floats, made().dir.file("other"), "--format",
                      "compressed-tensors", "--scale-coding", "csf"})
                .exit_code,
            2);
}

TEST(Flow, RunTellsWeightsAndOutputsThatAreNotFinite) {
  const std::string states = made().dir.file("nonfinite.safetensors"),
                    dump = made().dir.file("nonfinite_dump");
  const Words words = {"run",     made().packed, "--layer",  "1",
                       "--input", states,        "--output", made().dir.file("nonfinite_out")};
  const auto expect_counts = [](const nlohmann::json& json, int weights, int64_t outputs) {
    EXPECT_EQ(json["nonfinite_weights"], weights);
    EXPECT_EQ(json["nonfinite_outputs"], outputs);
  };
  write_states(states);
  expect_counts(json_of(words), 0, 0);
  EXPECT_THAT(run_ok(words).out, Not(HasSubstr("not finite")));

  write_states(states, std::numeric_limits<float>::quiet_NaN());
  EXPECT_THAT(run_ok(joined({words, {"--dump", dump}})).out,
              AllOf(HasSubstr("1 router weights are not finite"),
                    HasSubstr(std::to_string(kHidden) + " elements of out are not finite\n")));
  expect_counts(json_of(words), 1, kHidden);
  expect_counts(json_of({"run", "--replay", dump}), 1, kHidden);

  write_states(states, std::numeric_limits<float>::max());  // finite, but products overflow
  EXPECT_THAT(
      run_ok(words).out,
      HasSubstr("elements of out are not finite, by overflow: hidden and router weights are"));
}

TEST(Flow, RunDumpReplay) {
  const std::string states = made().dir.file("states.safetensors"),
                    out = made().dir.file("out.safetensors"),
                    dump = made().dir.file("dump.safetensors");
  write_states(states);
  const Words words = {"run", made().packed, "--layer", "1", "--input", states, "--output", out};
  EXPECT_THAT(run_ok(joined({words, {"--dump", dump}})).out,
              HasSubstr("nvfp4-moe run --replay " + dump));
  double sum = 0;
  for (const float value : read_out(out)) sum += std::abs(value);
  EXPECT_TRUE(std::isfinite(sum) && sum > 0) << sum;
  const nlohmann::json times = json_of(words);
  EXPECT_GT(times["elapsed_us"], 0.0);
  EXPECT_GE(times["repeats"], 1) << "a layer of this size takes far less than a second";
  EXPECT_GT(times["again_us"], 0.0);
  EXPECT_EQ(json_of({"run", "--replay", dump})["same_bits"], true);
  run_ok({"run", "--replay", dump, "--backend", "reference"});

  // A stored output that differs from this call's must be detected.
  {
    const auto file = must(SafetensorsFile::open(dump));
    const TensorInfo* stored = file->find("output");
    ASSERT_NE(stored, nullptr);
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
  const std::string states = made().dir.file("sum"), out = made().dir.file("sum_out");
  write_states(states);
  const auto run = [&](const Words& more) {
    run_ok(joined({{"run", made().packed, "--layer", "0", "--input", states, "--output", out,
                    "--activation-format", "bf16", "--row-format", "fp32"},
                   more}));
    return read_out(out);
  };
  const std::vector<float> whole = run({});
  for (const Words& option : std::vector<Words>{{"--expert-range", "0:3", "3:5"},
                                                {"--intermediate-slice", "0:32", "32:32"}}) {
    const std::vector<float> first = run({option[0], option[1]}),
                             second = run({option[0], option[2]});
    double error = 0, norm = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      error += std::pow(first[i] + second[i] - whole[i], 2);
      norm += std::pow(whole[i], 2);
    }
    EXPECT_TRUE(first != whole && second != whole) << option[0];
    // Rows stay in fp32, so only the order of fp32 additions differs: fewer than 100 of them, 2^-24
    // each, and the terms are at most a few times the sum.
    EXPECT_LT(std::sqrt(error / norm), 100 * 0x1p-24 * 4) << option[0];
  }
}

TEST(Flow, RunRefusesInputsThatDoNotFit) {
  const std::string states = made().dir.file("wrong.safetensors"), no = made().dir.file("no");
  const NamedTensor right =
      tensor("hidden", DType::kF32, {1, kHidden}, std::vector<float>(kHidden));
  for (const std::vector<NamedTensor>& wrong : std::vector<std::vector<NamedTensor>>{
           {tensor("hidden", DType::kF32, {2, 64}, std::vector<float>(128))},
           {tensor("hidden", DType::kI32, {1, kHidden}, std::vector<int32_t>(kHidden))},
           {right, tensor("topk_ids", DType::kI32, {1, 2}, std::vector<int32_t>{0, 8})}}) {
    write_named_tensors(states, wrong);
    const ToolRun run =
        run_tool({"run", made().packed, "--layer", "0", "--input", states, "--output", no});
    EXPECT_EQ(run.exit_code, 4) << run.err;
  }
  EXPECT_FALSE(std::filesystem::exists(no));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
