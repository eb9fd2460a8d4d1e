// --device: the verbs' errors if there is no such device; and run, replay, verify, bench, explain
// and doctor on a machine with a GPU (elsewhere skipped by name).
#include "cli/run_tool.h"
#include "moe/layer.h"
#include "support/checkpoint_builder.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;

struct Tiny {
  TempDir dir;
  std::string path = dir.file("tiny"), states = dir.file("states.safetensors");
  Tiny() {
    BuilderOptions options;
    options.layers = 1;
    EXPECT_OK(CheckpointBuilder(options).write(path));
    std::vector<float> hidden(static_cast<size_t>(9 * options.hidden_size));
    for (size_t i = 0; i < hidden.size(); ++i)
      hidden[i] = static_cast<float>(i * 37 % 101) / 16.0f - 3.0f;
    write_named_tensors(states, {tensor("hidden", DType::kF32, {9, options.hidden_size}, hidden)});
  }
};
Tiny& tiny() {
  static Tiny value;
  return value;
}

TEST(DeviceOption, IsJudgedByEveryVerbThatRunsLayers) {
  const std::string& dir = tiny().path;
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"verify", dir},
                                             {"bench", dir, "--tokens", "1"},
                                             {"explain", dir},
                                             {"inspect", dir},
                                             {"doctor"},
                                             {"run", dir, "--layer", "0", "--input", tiny().states,
                                              "--output", tiny().dir.file("never")}})
    for (const auto& [device, code, text] :
         {std::tuple("gpu", 2, "device: expected cpu or cuda:N, got gpu"),
          std::tuple("cuda:999", 3, "cuda:999")}) {  // no machine has that many
      const ToolRun run = run_tool(joined({words, {"--device", device}}));
      EXPECT_EQ(run.exit_code, code) << words[0] << run.err;
      EXPECT_THAT(run.err, HasSubstr(text));
    }
}

TEST(DeviceOption, ExplainTellsKernelsByTokens) {
  const nlohmann::json run = json_of({"explain", "--shape", "A", "--tokens", "300"});
  int64_t next = 1;  // each row begins after the last token of the one before
  for (const auto& row : run["variants"]) {
    EXPECT_EQ(row["first_tokens"], next);
    next = row["last_tokens"].get<int64_t>() + 1;
  }
  EXPECT_EQ(next, 301);
}

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
  }
  static ToolRun run(std::vector<std::string> words) {
    words.insert(words.end(), {"--device", "cuda:0", "--json", "--quiet"});
    ToolRun ran = run_tool(words);
    EXPECT_EQ(ran.exit_code, 0) << words[0] << ran.out << ran.err;
    return ran;
  }
};

TEST_F(OnGpu, VerbsUseIt) {
  for (const char* backend : {"auto", "cuda"})
    for (const char* format : {"nvfp4", "bf16"}) {
      const nlohmann::json json =
          run({"verify", tiny().path, "--backend", backend, "--activation-format", format}).json();
      EXPECT_EQ(json["device"], "cuda:0");
      EXPECT_EQ(json["failed_layers"], 0);
      EXPECT_THAT(json["details"]["layers"][0].dump(),
                  HasSubstr(backend == std::string("auto") ? "\"backend\"" : "\"cuda\""));
    }
  const nlohmann::json doctor = run({"doctor"}).json();
  ASSERT_FALSE(doctor["gpus"].empty());
  EXPECT_THAT(doctor["gpus"][0]["runs"].get<std::string>(), HasSubstr("backend "));
  int tested = 0;
  for (const auto& test : doctor["self_test"])
    tested += test["name"].get<std::string>().find("on cuda:0") != std::string::npos;
  EXPECT_GE(tested, 2);
  const nlohmann::json explained = run({"explain", "--shape", "deepseek-v4-flash"}).json();
  EXPECT_EQ(explained["device"], "cuda:0");
  EXPECT_FALSE(explained["variants"].empty());
}

TEST_F(OnGpu, RunsDumpsAndReplaysTheSameBits) {
  const std::string dump = tiny().dir.file("call.safetensors");
  const nlohmann::json json =
      run({"run", tiny().path, "--activation-format", "nvfp4", "--layer", "0", "--input",
           tiny().states, "--output", tiny().dir.file("out.safetensors"), "--dump", dump})
          .json();
  EXPECT_EQ(json["device"], "cuda:0");
  EXPECT_GT(json["quantized"][0]["blocks"], 0);
  EXPECT_EQ(run({"run", "--replay", dump}).json()["same_bits"], true);
  run_ok({"run", "--replay", dump});  // on the host: another order of sums, the same bounds
}

TEST_F(OnGpu, BenchTimesGraphsBesideTheFloor) {
  const nlohmann::json json = run({"bench", "--shape", "A", "--experts", "4", "--tokens", "1,16",
                                   "--seconds", "0.01", "--activation-format", "nvfp4,bf16"})
                                  .json();
  EXPECT_EQ(json["checked"], true);
  EXPECT_EQ(json["device"]["name"], "cuda:0");
  ASSERT_EQ(json["timings"].size(), 4u);
  for (const auto& row : json["timings"]) {
    EXPECT_GT(row["read_gb_per_s"], 100.0);
    EXPECT_GT(row["peak_gflop_per_s"], 1e4);
    const double read_us =
        row["touched_gb_per_s"].get<double>() / row["read_gb_per_s"].get<double>();
    const double flop_us = row["gflop_per_s"].get<double>() / row["peak_gflop_per_s"].get<double>();
    EXPECT_NEAR(row["floor_us"].get<double>(),
                std::max(read_us, flop_us) * row["median_us"].get<double>(),
                0.01 * row["floor_us"].get<double>());
    EXPECT_GE(row["times_floor"], 1.0);
  }
}

// A step's time is the extra time of a graph that includes it; launched one after another, steps
// take at least as long as a run.
TEST_F(OnGpu, BenchTimesSteps) {
  for (const char* format : {"nvfp4", "bf16"}) {
    const nlohmann::json json = run({"bench", "--shape", "A", "--experts", "16", "--tokens", "64",
                                     "--seconds", "0.05", "--steps", "--activation-format", format})
                                    .json();
    ASSERT_EQ(json["steps"].size(), 6u);
    double sum_us = 0;
    for (const auto& step : json["steps"]) {
      const bool gemm = step["step"] == "gemm1_swiglu" || step["step"] == "gemm2";
      if (gemm) {
        EXPECT_GT(step["median_us"], 1.0) << step;
      }
      sum_us += step["median_us"].get<double>();
    }
    EXPECT_GT(sum_us, 0.9 * json["timings"][0]["median_us"].get<double>());
  }
}

// One rank per GPU, at most two; rank N uses GPU N.
class RanksOnGpus : public OnGpu {
 protected:
  static std::string world() { return device_facts("cuda:1").ok() ? "2" : "1"; }
  static ToolRun run(std::vector<std::string> words) {
    words.insert(words.end(), {"--ep", world(), "--device", "cuda", "--json", "--quiet"});
    return run_tool(words);
  }
  static bool has_no_nccl(const std::string& text) {
    return text.find("nccl: expected libnccl.so.2") != std::string::npos;
  }
};

TEST_F(RanksOnGpus, VerifyGivesTheBitsOfOneRank) {
  for (const std::string combine : {"all_to_all", "all_reduce"})
    for (const char* format : {"nvfp4", "bf16"}) {
      const ToolRun ran =
          run({"verify", tiny().path, "--combine", combine, "--activation-format", format});
      if (has_no_nccl(ran.err)) GTEST_SKIP() << ran.err;
      ASSERT_EQ(ran.exit_code, 0) << ran.out << ran.err;
      const nlohmann::json json = ran.json();
      EXPECT_EQ(json["device"], "cuda");
      EXPECT_EQ(json["over"], "nccl");
      for (const auto& check : json["checks"]) {
        EXPECT_EQ(check["passed"], true) << check.dump();
        EXPECT_EQ(check["batch_invariant"], combine == "all_to_all") << check.dump();
        if (combine == "all_to_all") {
          EXPECT_EQ(check["same_bits"], "equal") << check.dump();
        }
      }
    }
}

TEST_F(RanksOnGpus, BenchTellsWhatTheExchangeAdds) {
  const ToolRun ran =
      run({"bench", "--shape", "A", "--experts", "8", "--tokens", "4,16", "--routing",
           "uniform,hot", "--balance", "--seconds", "0.01", "--activation-format", "nvfp4"});
  if (has_no_nccl(ran.err)) GTEST_SKIP() << ran.err;
  ASSERT_EQ(ran.exit_code, 0) << ran.out << ran.err;
  int exchanges = 0, balanced = 0;
  const nlohmann::json json = ran.json();
  for (const auto& row : json["timings"]) {
    EXPECT_GT(row["median_us"], 1.0) << row.dump();
    EXPECT_EQ(row["agree_share"], nullptr) << "a graph has no such parts";
    if (row["sent_bytes"].is_null()) continue;
    ++exchanges;
    balanced += row["placement"] == "balanced";
    EXPECT_EQ(row["over"], "nccl");
    EXPECT_GT(row["exchange_us"], 0.0) << row.dump();
    if (world() == "2") {
      EXPECT_GT(row["sent_bytes"], 0.0) << row.dump();
    }
  }
  EXPECT_EQ(exchanges, 2 * (2 + 4));
  EXPECT_EQ(balanced, 2 * 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
