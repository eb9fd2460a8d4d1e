// bench: how long a layer takes, beside what this host's memory could do in the same minutes.
//
// Before anything is timed, the backend is checked against the reference on a few tokens and experts of this very
// layer. Each timed call gets another batch, and small layers exist in several copies, so that no level of cache holds
// the weights from one call to the next. GB/s counts the touched experts' packed bytes once per call.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "check/judge.h"
#include "cli/bandwidth.h"
#include "cli/host.h"
#include "cli/layers.h"
#include "cli/lists.h"
#include "cli/random_layer.h"
#include "cli/subject.h"
#include "cli/verb.h"
#include "core/float_formats.h"

namespace nvfp4_moe::cli {
namespace {

constexpr int kBatches = 8;  // different routings per token count
constexpr int64_t kCheckExperts = 4;
constexpr int64_t kCheckTokens = 3;

struct BenchVerb {
  SubjectOptions subject;
  std::string tokens = "1,8,64";
  double seconds = 1.0;
  int64_t most_runs = 1000;
};

struct Timing {
  std::vector<double> us;  // ascending
  double rows = 0;         // means over the runs
  double experts = 0;
  double at(double share) const { return us[static_cast<size_t>(share * static_cast<double>(us.size() - 1) + 0.5)]; }
};

Result<std::unique_ptr<MoeLayer>> open_layer(const Subject& subject, const ExpertRange& range, int64_t max_tokens,
                                             const std::string& backend, Report& report, const ProgressFn& progress) {
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(subject.options));
  LayerOptions options;
  options.backend = backend;
  options.range = range;
  options.limits.max_tokens = max_tokens;
  options.executor = &report.executor();
  return MoeLayer::open(config, subject.source, options, progress);
}

std::vector<float> widened(const std::vector<uint16_t>& values) {
  std::vector<float> out;
  for (const uint16_t value : values) out.push_back(bf16_to_float(value));
  return out;
}

// Empty where the backend agrees with the reference on the first experts.
Result<std::string> disagreement(const Subject& subject, const std::string& backend, uint64_t seed, Report& report) {
  const ExpertRange range{subject.range.first, std::min(kCheckExperts, subject.range.count)};
  std::vector<std::vector<float>> outs;
  for (const std::string& name : {std::string("reference"), backend}) {
    NVFP4_MOE_ASSIGN(const auto layer, open_layer(subject, range, kCheckTokens, name, report, {}));
    NVFP4_MOE_ASSIGN(const Buffer workspace, allocate_pages(layer->workspace_bytes()));
    RandomTokens tokens = random_tokens(subject.options, range, kCheckTokens, seed);
    NVFP4_MOE_TRY(layer->run(tokens.batch(), workspace.data(), layer->workspace_bytes()));
    outs.push_back(widened(tokens.out));
  }
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(subject.options));
  const Comparison comparison = compare(outs[0].data(), outs[1].data(), kCheckTokens, subject.options.hidden_size);
  return broken_limit(comparison, layer_limits(config, kCheckTokens));
}

Result<Timing> time_layer(const std::vector<std::unique_ptr<MoeLayer>>& copies, const Subject& subject, int64_t tokens,
                          const BenchVerb& verb) {
  using Clock = std::chrono::steady_clock;
  std::vector<RandomTokens> batches;
  std::vector<double> experts;
  for (int i = 0; i < kBatches; ++i) {
    batches.push_back(
        random_tokens(subject.options, subject.range, tokens, verb.subject.seed + static_cast<uint64_t>(i)));
    const std::vector<int32_t>& ids = batches.back().ids;
    experts.push_back(static_cast<double>(std::set<int32_t>(ids.begin(), ids.end()).size()));
  }
  const size_t workspace_bytes = copies.front()->workspace_bytes();
  NVFP4_MOE_ASSIGN(const Buffer workspace, allocate_pages(workspace_bytes));
  Timing timing;
  const auto begin = Clock::now();
  // The first runs fault the workspace in and are not counted.
  for (int64_t run = -2; run < verb.most_runs; ++run) {
    const auto pick = static_cast<size_t>(run + 2);
    RandomTokens& batch = batches[pick % kBatches];
    const MoeLayer& layer = *copies[pick % copies.size()];
    const auto start = Clock::now();
    NVFP4_MOE_TRY(layer.run(batch.batch(), workspace.data(), workspace_bytes));
    const auto end = Clock::now();
    if (run < 0) continue;
    timing.us.push_back(std::chrono::duration<double, std::micro>(end - start).count());
    timing.experts += experts[pick % kBatches];
    if (run >= 4 && std::chrono::duration<double>(end - begin).count() > verb.seconds) break;
  }
  timing.experts /= static_cast<double>(timing.us.size());
  timing.rows = static_cast<double>(tokens * subject.options.top_k);
  std::sort(timing.us.begin(), timing.us.end());
  return timing;
}

Status report_timings(const std::vector<std::unique_ptr<MoeLayer>>& copies, const Subject& subject,
                      const std::vector<int64_t>& sweep, const BenchVerb& verb, Report& report) {
  const MoeOptions& sizes = subject.options;
  // A shared expert is touched by every call and has a row per token.
  const double intermediate = static_cast<double>(sizes.intermediate_size);
  const double shared = static_cast<double>(sizes.shared_intermediate_size);
  const double packed_bytes = static_cast<double>(copies.front()->weights().bytes.size_bytes());
  const double channel_bytes = packed_bytes / (static_cast<double>(subject.range.count) * intermediate + shared);
  const double channel_flop = 6.0 * static_cast<double>(sizes.hidden_size);
  NVFP4_MOE_ASSIGN(const ReadBandwidth bandwidth, ReadBandwidth::make(read_host().memory_bytes));
  Table table({{"tokens", "tokens"},
               {"rows", "rows"},
               {"experts_touched", "experts"},
               {"median_us", "median us"},
               {"min_us", "min us"},
               {"p90_us", "p90 us"},
               {"touched_gb_per_s", "GB/s"},
               {"read_gb_per_s", "host reads GB/s"},
               {"read_share", "% of it"},
               {"gflop_per_s", "GFLOP/s"},
               {"runs", "runs"}});
  bool noisy = false;
  ProgressBar bar(report.progress());
  const ProgressFn tell = bar.callback();
  for (size_t i = 0; i < sweep.size(); ++i) {
    const std::string item = fmt::format("{} tokens", sweep[i]);
    Progress progress;
    progress.what = "bench";
    progress.item = item;
    progress.done = static_cast<int64_t>(i);
    progress.total = static_cast<int64_t>(sweep.size());
    if (!tell(progress)) return Status(Code::kCancelled, "interrupted");
    // Before and after, because the host's speed drifts.
    const double before = bandwidth.measure(report.executor());
    NVFP4_MOE_ASSIGN(const Timing timing, time_layer(copies, subject, sweep[i], verb));
    const double read = std::max(before, bandwidth.measure(report.executor())) * 1e-9;
    const double median_s = timing.at(0.5) * 1e-6;
    const double touched = (timing.experts * intermediate + shared) * channel_bytes * 1e-9 / median_s;
    const double flop = (timing.rows * intermediate + static_cast<double>(sweep[i]) * shared) * channel_flop;
    noisy = noisy || timing.at(0.9) > 1.5 * timing.us.front();
    table.add({cell(sweep[i]),
               cell(static_cast<int64_t>(timing.rows)),
               cell(timing.experts, "{:.1f}"),
               cell(timing.at(0.5), "{:.1f}"),
               cell(timing.us.front(), "{:.1f}"),
               cell(timing.at(0.9), "{:.1f}"),
               cell(touched, "{:.2f}"),
               cell(read, "{:.1f}"),
               {fmt::format("{:.0f}", 100 * touched / read), touched / read},
               cell(flop * 1e-9 / median_s, "{:.1f}"),
               cell(static_cast<int64_t>(timing.us.size()))});
  }
  report.table("timings", table);
  report.json()["noisy"] = noisy;
  if (noisy) {
    report.fact("note", "p90 is more than 1.5 times the fastest run: this host was busy", Style::kWarning);
  }
  return {};
}

Status bench(const BenchVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> sweep, parse_sweep(verb.tokens));
  const int64_t most_tokens = *std::max_element(sweep.begin(), sweep.end());
  if (most_tokens > int64_t{1} << 24) return invalid_argument("--tokens: at most 16777216");
  NVFP4_MOE_ASSIGN(const std::string backend, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const Subject subject, open_subject(verb.subject, CheckScales::kYes));

  std::vector<std::unique_ptr<MoeLayer>> copies;
  std::string broken;
  {
    ProgressBar bar(report.progress());
    NVFP4_MOE_ASSIGN(broken, disagreement(subject, backend, verb.subject.seed, report));
    if (broken.empty()) {
      // As many copies as keep twice the last level of cache busy, at most four.
      do {
        NVFP4_MOE_ASSIGN(auto layer, open_layer(subject, subject.range, most_tokens, backend, report, bar.callback()));
        copies.push_back(std::move(layer));
      } while (copies.size() < 4 &&
               copies.size() * copies.front()->weights().bytes.size_bytes() < 2 * last_level_cache_bytes());
    }
  }
  const MoeOptions& sizes = subject.options;
  report.json()["layer"] = subject.name;
  report.json()["checked"] = broken.empty();
  report.fact("layer", fmt::format("{}: experts {}:{} of {}, top-{}, hidden {}, intermediate {}", subject.name,
                                   subject.range.first, subject.range.count, sizes.num_experts, sizes.top_k,
                                   sizes.hidden_size, sizes.intermediate_size));
  if (!broken.empty()) {
    report.fail("not timed, because it disagrees with the reference: " + broken);
    report.fact("FAIL", "not timed, because it disagrees with the reference: " + broken, Style::kBad);
    return {};
  }
  const HostFacts host = read_host();
  const MoeLayer& layer = *copies.front();
  report.fact("host", fmt::format("{}, {} of {} threads", host.cpu, report.executor().threads(), host.threads));
  report.fact("backend", fmt::format("{}, {} activations, packed {} x {} cop{}, checked against the reference",
                                     layer.backend().name, to_string(sizes.activation_format),
                                     bytes_text(layer.weights().bytes.size_bytes()), copies.size(),
                                     copies.size() == 1 ? "y" : "ies"));
  report.json()["host"] = {{"cpu", host.cpu}, {"threads", report.executor().threads()}};
  report.json()["copies"] = copies.size();
  report.json()["packed_bytes"] = layer.weights().bytes.size_bytes();
  report.json()["describe"] = Json::parse(layer.describe_json(), nullptr, false);
  return report_timings(copies, subject, sweep, verb, report);
}

}  // namespace

void add_bench(CLI::App& app, Invocation& invocation) {
  add_verb<BenchVerb>(
      app, invocation, "bench", "Times a layer beside this host's read bandwidth", UsesBackend::kYes, bench,
      [](CLI::App& verb, BenchVerb& options) {
        add_subject(verb, options.subject, true);
        verb.add_option("--tokens", options.tokens, "Sweep, for example 1,8,64..4096:x2")->capture_default_str();
        verb.add_option("--seconds", options.seconds, "For each token count, at least 5 runs")
            ->check(CLI::Range(0.0, 3600.0))
            ->capture_default_str();
        verb.add_option("--runs", options.most_runs, "At most, for each token count")
            ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
            ->capture_default_str();
      });
}

}  // namespace nvfp4_moe::cli
