// bench as an instrument: its comparisons, the alternation of configurations, and cold weights.
#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
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
  std::map<std::string, std::vector<double>> medians;
  for (const auto& round : json["rounds"]) {
    const std::string name = round["backend"].get<std::string>() + " " +
                             round["activation_format"].get<std::string>() + " " +
                             round["tokens"].dump();
    order.push_back(name + " " + round["round"].dump());
    medians[name].push_back(round["median_us"]);
  }
  for (const char* tokens : {"1", "2"})
    for (const char* round : {"0", "1"})
      for (const char* name : {"cpu nvfp4", "cpu bf16", "reference nvfp4", "reference bf16"})
        expected.push_back(std::string(name) + " " + tokens + " " + round);
  EXPECT_EQ(order, expected);
  EXPECT_EQ(json["checked"], true);
  ASSERT_EQ(json["timings"].size(), 8u);
  const nlohmann::json& row = json["timings"][0];
  const auto [least, most] = std::minmax(medians["cpu nvfp4 1"][0], medians["cpu nvfp4 1"][1]);
  EXPECT_EQ(row["median_us"], (least + most) / 2);
  EXPECT_EQ(row["range"]["median_us"], nlohmann::json({least, most}));
  EXPECT_GT(row["min_us"], 0.0);
  EXPECT_LE(row["min_us"], row["median_us"]);
  EXPECT_GE(row["runs"], 2 * 5);
  EXPECT_FALSE(json.contains("steps")) << "they were not asked for";
}

void expect_shares(const nlohmann::json& row, bool has_peak) {
  const auto of = [&row](const char* figure) { return row[figure].get<double>(); };
  const double us = of("median_us");
  // One round: all figures are of the same runs.
  EXPECT_NEAR(of("read_share"), of("touched_gb_per_s") / of("read_gb_per_s"), 1e-9);
  EXPECT_NEAR(of("touched_gb_per_s") * us * 1e3, of("experts_touched") * 3 * 2048 * 1408 * 9 / 16,
              1e3);
  EXPECT_NEAR(of("gflop_per_s") * us * 1e3, of("rows") * 6 * 2048 * 1408, 1e3);
  EXPECT_EQ(row["peak_share"].is_null(), !has_peak);
  const double peak_share = has_peak ? of("gflop_per_s") / of("peak_gflop_per_s") : 0;
  if (has_peak) {
    EXPECT_NEAR(of("peak_share"), peak_share, 1e-9);
  }
  EXPECT_NEAR(of("limit_share"), std::max(peak_share, of("read_share")), 1e-9);
  EXPECT_EQ(row["limit"] == "read", of("read_share") >= peak_share) << row.dump();
}

void expect_peaks_of_this_host(const nlohmann::json& peaks) {
  const std::vector<std::string> has = read_host().instruction_sets;
  std::set<std::string> names, expected = {"read"};
  for (const auto& peak : peaks) {
    names.insert(peak["name"]);
    EXPECT_GT(peak[peak["name"] == "read" ? "gb_per_s" : "gflop_per_s"].get<double>(), 0);
  }
  for (const auto& [set, peak] :
       std::map<std::string, std::string>{{"avx2", "avx2_fma"},
                                          {"avx512f", "avx512_fma"},
                                          {"avx512_vnni", "avx512_vnni_scaled"},
                                          {"avx512_bf16", "avx512_bf16_dot"}})
    if (std::count(has.begin(), has.end(), set) > 0) expected.insert(peak);
  EXPECT_TRUE(std::includes(names.begin(), names.end(), expected.begin(), expected.end()));
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

TEST(AllThreads, WaitForEachOtherBeforeTheyBegin) {
  const auto pool = make_thread_pool(3);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<int> inside{0};
    std::vector<std::thread::id> ids(3);
    const double seconds = time_on_all_threads(*pool, [&](int64_t thread) {
      ++inside;
      while (inside.load() < 3)
        std::this_thread::yield();  // ends only if all three threads are here at once
      ids[static_cast<size_t>(thread)] = std::this_thread::get_id();
    });
    EXPECT_GT(seconds, 0);
    EXPECT_EQ(inside.load(), 3) << "each once";
    EXPECT_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(), 3u);
  }
}

TEST(ReadBandwidth, GrowsWithTheCacheAndStaysWithinMemory) {
  const auto pool = make_thread_pool(2);
  auto small = ReadBandwidth::make(uint64_t{64} << 20, *pool);
  ASSERT_OK(small);
  EXPECT_EQ(small->size_bytes(), uint64_t{8} << 20);
  EXPECT_GT(small->measure(*pool), 0);
}

TEST(TimedLayer, BatchesTouchWhatWasNotTouchedForLongest) {
  const MoeOptions options = test::sizes_of(64, 6, 16);
  const ExpertRange range{8, 24};  // 24 local experts: four batches of one token
  std::vector<int32_t> oldest(24);
  std::iota(oldest.begin(), oldest.end(), 8);
  std::map<int32_t, int> last;
  for (int i = 0; i < 40; ++i) {
    RandomTokens batch = random_tokens(options, range, 1, static_cast<uint64_t>(i));
    EXPECT_EQ(touch_oldest(batch, oldest), 6u);
    for (const int32_t id : batch.ids) {
      EXPECT_TRUE(id >= 8 && id < 32);
      const auto found = last.find(id);
      EXPECT_TRUE(found == last.end() || i - found->second == 4) << "all others come first";
      last[id] = i;
    }
  }
  EXPECT_EQ(last.size(), 24u);
}

TEST(TimedLayer, OtherNamesKeepTheRouting) {
  std::vector<int32_t> oldest(16);
  std::iota(oldest.rbegin(), oldest.rend(), 0);
  const RandomTokens before = random_tokens(test::sizes_of(16, 4, 16), {0, 16}, 5, 7);
  RandomTokens after = before;
  touch_oldest(after, oldest);
  std::map<int32_t, int32_t> names;
  std::set<int32_t> used;
  for (size_t i = 0; i < before.ids.size(); ++i) {
    const auto [name, is_new] = names.try_emplace(before.ids[i], after.ids[i]);
    EXPECT_EQ(name->second, after.ids[i]);
    EXPECT_EQ(used.insert(after.ids[i]).second, is_new) << "two experts with one name";
  }
  EXPECT_EQ(before.weights, after.weights);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cli
