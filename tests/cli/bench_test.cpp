// bench as an instrument: its comparisons, the alternation of configurations, and cold weights.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "cli/bench/all_threads.h"
#include "cli/bench/bandwidth.h"
#include "cli/bench/cpu_peaks.h"
#include "cli/bench/host.h"
#include "cli/bench/timed_layer.h"
#include "cli/run_tool.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/checkpoint_builder.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cli {
namespace {

using testing::Each;

nlohmann::json bench(const std::vector<std::string>& words) {
  return test::json_of(test::joined({{"bench"}, words, {"--seconds", "0", "--quiet"}}));
}

TEST(Bench, ConfigurationsTakeTurns) {
  const test::TempDir dir;
  ASSERT_OK(test::CheckpointBuilder(test::BuilderOptions{}).write(dir.file("tiny")));
  const nlohmann::json json =
      bench({dir.file("tiny"), "--tokens", "1,2", "--rounds", "2", "--activation-format",
             "nvfp4,bf16", "--backend", "cpu,reference"});
  std::vector<std::string> order, expected;
  for (const auto& round : json["rounds"]) {
    order.push_back(round["backend"].get<std::string>() + " " +
                    round["activation_format"].get<std::string>() + " " + round["tokens"].dump() +
                    " " + round["round"].dump());
  }
  for (const char* tokens : {"1", "2"})
    for (const char* round : {"0", "1"})
      for (const char* name : {"cpu nvfp4", "cpu bf16", "reference nvfp4", "reference bf16"})
        expected.push_back(std::string(name) + " " + tokens + " " + round);
  EXPECT_EQ(order, expected);

  EXPECT_EQ(json["checked"], true);
  ASSERT_EQ(json["timings"].size(), 8u);
  for (const auto& row : json["timings"]) {
    EXPECT_GT(row["min_us"], 0.0);
    EXPECT_LE(row["min_us"], row["median_us"]);
    EXPECT_LE(row["median_us"], row["p90_us"]);
    EXPECT_GT(row["read_gb_per_s"], 0.0);
    EXPECT_GE(row["runs"], 5);
    std::vector<double> medians;
    for (const auto& round : json["rounds"]) {
      if (round["backend"] == row["backend"] &&
          round["activation_format"] == row["activation_format"] &&
          round["tokens"] == row["tokens"])
        medians.push_back(round["median_us"]);
    }
    ASSERT_EQ(medians.size(), 2u);
    EXPECT_EQ(row["median_us"], median(medians));
    EXPECT_EQ(row["range"]["median_us"][0], std::min(medians[0], medians[1]));
    EXPECT_EQ(row["range"]["median_us"][1], std::max(medians[0], medians[1]));
  }
  EXPECT_FALSE(json.contains("steps")) << "they were not asked for";
}

void expect_shares(const nlohmann::json& row, bool has_peak) {
  const double read_share = row["read_share"];
  EXPECT_GT(read_share, 0);
  EXPECT_TRUE(std::isfinite(read_share));
  // One round: all figures are of the same runs.
  EXPECT_NEAR(read_share,
              row["touched_gb_per_s"].get<double>() / row["read_gb_per_s"].get<double>(), 1e-9);
  EXPECT_NEAR(row["touched_gb_per_s"].get<double>() * row["median_us"].get<double>() * 1e3,
              row["experts_touched"].get<double>() * 3 * 2048 * 1408 * 9 / 16, 1e3);
  EXPECT_NEAR(row["gflop_per_s"].get<double>() * row["median_us"].get<double>() * 1e3,
              row["rows"].get<double>() * 6 * 2048 * 1408, 1e3);
  if (!has_peak) {
    EXPECT_TRUE(row["peak_share"].is_null());
    EXPECT_EQ(row["limit"], "read");
    return;
  }
  const double peak_share = row["peak_share"];
  EXPECT_GT(peak_share, 0);
  EXPECT_NEAR(peak_share, row["gflop_per_s"].get<double>() / row["peak_gflop_per_s"].get<double>(),
              1e-9);
  EXPECT_EQ(row["limit_share"].get<double>(), std::max(peak_share, read_share));
  EXPECT_EQ(row["limit"] == "read", read_share >= peak_share) << row.dump();
}

void expect_peaks_of_this_host(const nlohmann::json& peaks) {
  std::set<std::string> names;
  for (const auto& peak : peaks) {
    names.insert(peak["name"]);
    EXPECT_GT(peak[peak["name"] == "read" ? "gb_per_s" : "gflop_per_s"].get<double>(), 0)
        << peak.dump();
  }
  const std::vector<std::string> has = read_host().instruction_sets;
  const std::set<std::string> flags(has.begin(), has.end());
  EXPECT_EQ(names.count("read"), 1u);
  EXPECT_EQ(names.count("avx2_fma"), flags.count("avx2"));
  EXPECT_EQ(names.count("avx512_fma"), flags.count("avx512f"));
  EXPECT_EQ(names.count("avx512_vnni_scaled"), flags.count("avx512_vnni"));
  EXPECT_EQ(names.count("avx512_bf16_dot"), flags.count("avx512_bf16"));
}

void expect_steps(const nlohmann::json& steps) {
  ASSERT_EQ(steps.size(), kSteps);
  double shares = 0;
  for (size_t step = 0; step < kSteps; ++step) {
    const auto& row = steps[step];
    EXPECT_EQ(row["step"], kStepNames[step]);
    EXPECT_GT(row["median_us"].get<double>(), 0);
    shares += row["share"].get<double>();
    EXPECT_EQ(row["gflop_per_s"].is_null(), step != kGemm1 && step != kGemm2);
  }
  EXPECT_NEAR(shares, 1, 1e-9);
}

TEST(Bench, SharesAreOfWhatWasMeasuredBesideThem) {
  const nlohmann::json json = bench({"--shape", "A", "--experts", "8", "--tokens", "4", "--steps"});
  ASSERT_EQ(json["timings"].size(), 1u);
  // A host that runs the portable kernels has none.
  const nlohmann::json& peak = json["configurations"][0]["peak"];
  expect_shares(json["timings"][0], !peak.is_null());
  const std::string kernel = json["configurations"][0]["describe"]["kernels"]["gemm2"];
  EXPECT_EQ(peak.is_null(), peak_of_kernel(kernel) == nullptr) << kernel;
  expect_peaks_of_this_host(json["peaks"]);
  expect_steps(json["steps"]);
}

TEST(Peaks, EveryKernelForAnInstructionSetHasOne) {
  MoeOptions options = test::sizes_of(2, 1, 64, 64);
  for (const ActivationFormat format : test::kActivationFormats) {
    options.activation_format = format;
    const auto config = MoeConfig::make(options);
    ASSERT_OK(config);
    for (const Backend& backend : cpu_instruction_sets()) {
      if (!backend.supports(*config, host_facts()).ok()) continue;
      const auto plan = backend.plan(*config, {0, 2}, {}, Limits{1}, host_facts());
      ASSERT_OK(plan);
      for (const StepPlan& step : plan->steps) {
        if (step.step != kStepNames[kGemm1] && step.step != kStepNames[kGemm2]) continue;
        EXPECT_EQ(peak_of_kernel(step.kernel) == nullptr,
                  backend.name == std::string("cpu:portable"))
            << step.kernel;
      }
    }
  }
  EXPECT_EQ(peak_of_kernel("no_such_kernel"), nullptr);
}

TEST(Peaks, EveryOneOfThisHostRunsOnEveryThread) {
  const auto pool = make_thread_pool(3);
  for (const ComputePeak& peak : compute_peaks()) {
    if (!peak.runs_here()) continue;
    const double rate = measure(peak, *pool);
    EXPECT_TRUE(std::isfinite(rate)) << peak.name;
    EXPECT_GT(rate, 0) << peak.name;
  }
}

TEST(AllThreads, WaitForEachOtherBeforeTheyBegin) {
  const auto pool = make_thread_pool(3);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<int> inside{0};
    std::vector<int> seen(3);
    std::vector<std::thread::id> ids(3);
    const double seconds = time_on_all_threads(*pool, [&](int64_t thread) {
      const auto at = static_cast<size_t>(thread);
      ++inside;
      while (inside.load() < 3)
        std::this_thread::yield();  // ends only if all three threads are here at once
      ++seen[at];
      ids[at] = std::this_thread::get_id();
    });
    EXPECT_GT(seconds, 0);
    EXPECT_THAT(seen, Each(1));
    EXPECT_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(), 3u);
  }
}

TEST(ReadBandwidth, GrowsWithTheCacheAndStaysWithinMemory) {
  const auto pool = make_thread_pool(2);
  auto small = ReadBandwidth::make(uint64_t{64} << 20, *pool);
  ASSERT_OK(small);
  EXPECT_EQ(small->size_bytes(), uint64_t{8} << 20);
  const double rate = small->measure(*pool);
  EXPECT_GT(rate, 0);
  EXPECT_TRUE(std::isfinite(rate));
}

TEST(TimedLayer, BatchesTouchWhatWasNotTouchedForLongest) {
  const MoeOptions options = test::sizes_of(64, 6, 16);
  const ExpertRange range{8, 24};  // 24 local experts: four batches of one token
  std::vector<int32_t> oldest;
  for (int32_t id = 8; id < 32; ++id) oldest.push_back(id);
  std::map<int32_t, int> last;
  for (int i = 0; i < 40; ++i) {
    RandomTokens batch = random_tokens(options, range, 1, static_cast<uint64_t>(i));
    EXPECT_EQ(touch_oldest(batch, oldest), 6u);
    for (const int32_t id : batch.ids) {
      EXPECT_TRUE(id >= 8 && id < 32);
      const auto found = last.find(id);
      EXPECT_TRUE(found == last.end() || i - found->second == 4)
          << "every other expert comes first";
      last[id] = i;
    }
  }
  EXPECT_EQ(last.size(), 24u);
}

TEST(TimedLayer, OtherNamesKeepTheRouting) {
  const MoeOptions options = test::sizes_of(16, 4, 16);
  std::vector<int32_t> oldest;
  for (int32_t id = 15; id >= 0; --id) oldest.push_back(id);
  const RandomTokens before = random_tokens(options, {0, 16}, 5, 7);
  RandomTokens after = before;
  touch_oldest(after, oldest);
  std::map<int32_t, int32_t> forth, back;
  for (size_t i = 0; i < before.ids.size(); ++i) {
    EXPECT_EQ(forth.try_emplace(before.ids[i], after.ids[i]).first->second, after.ids[i]);
    EXPECT_EQ(back.try_emplace(after.ids[i], before.ids[i]).first->second, before.ids[i]);
  }
  EXPECT_EQ(before.weights, after.weights);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cli
