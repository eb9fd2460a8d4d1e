#include "cli/bench/configuration.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/bench/bandwidth.h"
#include "cli/bench/host.h"
#include "cli/bench/random_layer.h"
#include "cli/console/lists.h"
#include "judge/judge.h"
#include "moe/placed_batch.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr int64_t kCheckExperts = 4;
constexpr int64_t kCheckTokens = 3;
constexpr int64_t kMostCopies = 16;

}  // namespace

Result<std::string> disagreement(const Configuration& configuration, const std::string& device,
                                 uint64_t seed, Executor& executor) {
  Subject few;
  few.options = configuration.subject.options;
  few.source = configuration.subject.source;
  few.range = {configuration.subject.range.first,
               std::min(kCheckExperts, configuration.subject.range.count)};
  std::vector<std::vector<float>> outs;
  for (const auto& [name, place] : {std::pair(std::string("reference"), std::string("cpu")),
                                    std::pair(configuration.backend, device)}) {
    NVFP4_MOE_ASSIGN(const TimedLayer one,
                     TimedLayer::open(few, name, place, kCheckTokens, 1, executor, {}));
    RandomTokens tokens = random_tokens(few.options, few.range, kCheckTokens, seed);
    NVFP4_MOE_TRY(run_from_host(one.layer(), tokens.batch()).status());
    outs.push_back(tokens.out_floats());
  }
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(few.options));
  const Comparison comparison =
      compare(outs[0].data(), outs[1].data(), kCheckTokens, few.options.hidden_size);
  return broken_limit(comparison, layer_limits(config, kCheckTokens));
}

Result<int64_t> copies_of(const std::vector<Configuration>& all, const DeviceFacts& device,
                          const std::string& device_name, double layers_each) {
  double packed_bytes = 0, most_bytes = 0;
  for (const Configuration& one : all) {
    NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(one.subject.options));
    LayerOptions options;
    options.backend = one.backend;
    options.device = device_name;
    options.range = one.subject.range;
    options.limits.max_tokens = 1;
    NVFP4_MOE_ASSIGN(const LayerNeeds needs,
                     plan_layer(config, one.subject.source.scales, options));
    packed_bytes += static_cast<double>(needs.packed_bytes) * layers_each;
    most_bytes = std::max(most_bytes, static_cast<double>(needs.packed_bytes));
  }
  constexpr int64_t kLargestDeviceCache = int64_t{128} << 20;  // at least that of any GPU
  const bool on_device = device.kind == DeviceKind::kCuda;
  const auto available = static_cast<double>(on_device ? static_cast<uint64_t>(device.memory_bytes)
                                                       : read_host().memory_available_bytes);
  const auto cache_bytes = static_cast<double>(
      on_device ? static_cast<uint64_t>(kLargestDeviceCache) : last_level_cache_bytes());
  if (packed_bytes > available) {
    return Status(
        Code::kOutOfMemory,
        fmt::format(
            "memory: expected {} for the layers that take turns, got {} that are free (fewer at a "
            "time, or --experts)",
            bytes_text(static_cast<uint64_t>(packed_bytes)),
            bytes_text(static_cast<uint64_t>(available))));
  }
  const auto wanted = static_cast<int64_t>(2 * cache_bytes / most_bytes) + 1;
  const auto room = static_cast<int64_t>(available / 2 / packed_bytes);
  return std::clamp<int64_t>(std::min(wanted, room), 1, kMostCopies);
}

const ComputePeak* peak_of_layer(const MoeLayer& layer) {
  for (const StepPlan& step : layer.plan().steps)
    if (step.step == "gemm2") return peak_of_kernel(step.kernel);
  return nullptr;
}

Result<BenchRound> time_round(Configuration& one, int64_t tokens, const Repeat& repeat, bool steps,
                              Executor& executor) {
  const auto peak_now = [&] {
    return one.peak == nullptr ? one.peak_gflop_per_s : measure(*one.peak, executor) * 1e-9;
  };
  BenchRound round;
  const double before = peak_now();
  NVFP4_MOE_ASSIGN(round.times, one.timed->time_runs(repeat));
  round.peak_gflop_per_s = std::max(before, peak_now());
  round.work = work_of(one.timed->layer(), tokens, round.times.experts);
  if (steps) {
    NVFP4_MOE_ASSIGN(round.step_us, one.timed->time_steps(repeat));
  }
  return round;
}

}  // namespace nvfp4_moe::internal::cli
