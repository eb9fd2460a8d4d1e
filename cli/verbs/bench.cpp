// bench: times a layer and compares it with the peak rates of this host's or device's memory and
// arithmetic units.
//
// Before timing, each backend is checked against the reference on a few tokens and experts of the
// same layer. Each round times every configuration (backend x activation format), so that a change
// of the host's speed affects all of them. Figures are medians over the rounds, with their range.
// GB/s counts the touched experts' packed bytes once per call. A host's peak rates are measured
// around each figure; a GPU's are steady and measured once.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/bench/bandwidth.h"
#include "cli/bench/host.h"
#include "cli/bench/rank_batches.h"
#include "cli/console/lists.h"
#include "cli/verbs/bench_options.h"
#include "cli/verbs/output_option.h"
#include "cli/verbs/ranks.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal::cli {
namespace {

Table peaks_table(const std::string& whose) {
  return Table({{"name", "peak of " + whose, false},
                {"gb_per_s", "GB/s"},
                {"gflop_per_s", "GFLOP/s"},
                {"instructions", "by", false}});
}

// Measures the device's peak rates, with the instruction of each backend's GEMMs.
Status measure_device(std::vector<Configuration>& all, const std::string& device, Report& report) {
  Table table = peaks_table(device);
  double read_gb_per_s = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    Configuration& one = all[i];
    const Backend& backend = one.timed->layer().backend();
    if (backend.measures == nullptr)
      return unsupported(std::string("bench: backend ") + backend.name +
                         " cannot measure its device");
    const int index = one.timed->layer().weights().device;
    if (i == 0) {
      NVFP4_MOE_ASSIGN(const double rate, backend.measures->read_rate(index));
      read_gb_per_s = rate * 1e-9;
      table.add(
          {cell("read"), cell(read_gb_per_s, "{:.1f}"), no_cell(), cell("loads of up to 4 GiB")});
    }
    one.read_gb_per_s = read_gb_per_s;
    one.peak_name = std::string("bf16 tensor cores, ") + backend.name;
    const auto same =
        std::find_if(all.begin(), all.begin() + static_cast<int64_t>(i),
                     [&](const Configuration& other) { return other.peak_name == one.peak_name; });
    if (same != all.begin() + static_cast<int64_t>(i)) {
      one.peak_gflop_per_s = same->peak_gflop_per_s;
      continue;
    }
    NVFP4_MOE_ASSIGN(const double flop_per_s, backend.measures->product_rate(index));
    one.peak_gflop_per_s = flop_per_s * 1e-9;
    table.add({cell(one.peak_name), no_cell(), cell(one.peak_gflop_per_s, "{:.0f}"),
               cell(backend.measures->product_instruction)});
  }
  report.table("peaks", table);
  report.line("");
  return {};
}

void report_peaks(ReadBandwidth& bandwidth, Report& report) {
  Table table = peaks_table("all threads");
  table.add({cell("read"), cell(bandwidth.measure(report.executor()) * 1e-9, "{:.1f}"), no_cell(),
             cell(fmt::format("loads of {}", bytes_text(bandwidth.size_bytes())))});
  for (const ComputePeak& peak : compute_peaks()) {
    if (!peak.runs_here()) continue;
    table.add({cell(peak.name), no_cell(), cell(measure(peak, report.executor()) * 1e-9, "{:.1f}"),
               cell(peak.instructions)});
  }
  report.table("peaks", table);
  report.line("");
}

Status time_all(std::vector<Configuration>& all, const std::vector<int64_t>& sweep,
                const BenchVerb& verb, std::optional<ReadBandwidth>& bandwidth, Report& report) {
  const bool on_device = !bandwidth;
  const auto host_reads = [&] {
    return on_device ? 0.0 : bandwidth->measure(report.executor()) * 1e-9;
  };
  std::vector<BenchCell> cells;
  Json in_order = Json::array();
  bool noisy = false;
  {
    ProgressBar bar(report.progress());
    const ProgressFn advance = bar.callback();
    Progress progress;
    progress.what = "bench";
    progress.total = static_cast<int64_t>(sweep.size() * all.size()) * verb.rounds;
    for (const int64_t tokens : sweep) {
      const std::string item = fmt::format("{} tokens", tokens);
      progress.item = item;
      const size_t first = cells.size();
      for (Configuration& one : all) {
        NVFP4_MOE_TRY(one.timed->prepare(tokens, verb.subject.seed));
        cells.push_back({one.backend, one.format(), tokens, one.peak_name, {}});
      }
      // Measured before and after each round, because the host's speed drifts.
      double read_before = host_reads();
      for (int64_t number = 0; number < verb.rounds; ++number) {
        for (size_t i = 0; i < all.size(); ++i, ++progress.done) {
          if (!advance(progress)) return Status(Code::kCancelled, "interrupted");
          NVFP4_MOE_ASSIGN(BenchRound round,
                           time_round(all[i], tokens, verb.repeat, verb.steps, report.executor()));
          const double read_after = host_reads();
          round.read_gb_per_s =
              on_device ? all[i].read_gb_per_s : std::max(read_before, read_after);
          read_before = read_after;
          noisy = noisy || round.times.at(0.9) > 1.5 * round.times.us.front();
          BenchCell& cell = cells[first + i];
          cell.rounds.push_back(std::move(round));
          in_order.push_back(round_json(cell, cell.rounds.size() - 1));
        }
      }
    }
  }
  report.table("timings", timings_table(cells, on_device));
  if (verb.steps) {
    report.line("");
    report.table("steps", steps_table(cells));
  }
  report.json()["rounds"] = in_order;
  report.json()["noisy"] = noisy;
  if (noisy) {
    report.fact("note",
                fmt::format("p90 is more than 1.5 times the fastest run: this {} was busy",
                            on_device ? "GPU" : "host"),
                Style::kWarning);
  }
  return {};
}

Status bench(const BenchVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string page, checked_page(verb.html, "", {verb.subject.path}));
  if (verb.ranks > 0) return bench_ranks(verb, page, report);
  if (!verb.combine.empty() || !verb.routing.empty() || !verb.over.empty() || verb.balance ||
      verb.slots_per_rank)
    return invalid_argument(
        "--combine, --routing, --over, --balance, --slots-per-rank: expected --ep too");
  begin_page(page, report);
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> sweep, token_sweep(verb));
  const int64_t most_tokens = *std::max_element(sweep.begin(), sweep.end());
  NVFP4_MOE_ASSIGN(std::vector<Configuration> all, configurations(verb, report));
  const std::string& device = report.common().device;
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts(device));
  const bool on_device = facts.kind == DeviceKind::kCuda;
  Executor& executor = report.executor();
  const Subject& subject = all.front().subject;
  report.json()["layer"] = subject.name;
  report.fact("layer", sizes_text(subject));
  NVFP4_MOE_ASSIGN(const bool agree, check_all(all, device, verb.subject.seed, report));
  report.json()["checked"] = agree;
  if (!agree) return {};

  const HostFacts host = read_host();
  std::optional<ReadBandwidth> bandwidth;
  if (!on_device) {
    NVFP4_MOE_ASSIGN(bandwidth, ReadBandwidth::make(host.memory_bytes, executor));
  }
  NVFP4_MOE_ASSIGN(const int64_t copies, copies_of(all, facts, device));
  report.fact("host",
              fmt::format("{}, {} of {} threads", host.cpu, executor.threads(), host.threads));
  report.json()["host"] = {{"cpu", host.cpu},
                           {"threads", executor.threads()},
                           {"available_threads", host.threads},
                           {"last_level_cache_bytes", last_level_cache_bytes()}};
  if (on_device)
    report.fact("device", fmt::format("{}, {} multiprocessors", facts.name, facts.compute_units));
  report.json()["device"] = {{"name", device},
                             {"model", on_device ? Json(facts.name) : Json(nullptr)}};
  report.json()["copies"] = copies;
  report.json()["read_buffer_bytes"] = bandwidth ? Json(bandwidth->size_bytes()) : Json(nullptr);
  Json described = Json::array();
  for (Configuration& one : all) {
    ProgressBar bar(report.progress());
    NVFP4_MOE_ASSIGN(one.timed, TimedLayer::open(one.subject, one.backend, device, most_tokens,
                                                 copies, executor, bar.callback()));
    const MoeLayer& layer = one.timed->layer();
    one.backend = layer.backend().name;
    one.peak = on_device ? nullptr : peak_of_layer(layer);
    if (one.peak != nullptr) one.peak_name = one.peak->name;
    const size_t packed_bytes = layer.weights().bytes.size_bytes();
    report.fact(
        "backend",
        fmt::format("{}, {} activations, packed {} x {} cop{}, checked against the reference",
                    one.backend, one.format(), bytes_text(packed_bytes), copies,
                    copies == 1 ? "y" : "ies"));
    described.push_back({{"backend", one.backend},
                         {"activation_format", one.format()},
                         {"packed_bytes", packed_bytes},
                         {"peak", one.peak == nullptr ? Json() : Json(one.peak->name)},
                         {"describe", Json::parse(layer.describe_json())}});
  }
  report.json()["configurations"] = described;
  report.line("");
  if (on_device) {
    NVFP4_MOE_TRY(measure_device(all, device, report));
  } else {
    report_peaks(*bandwidth, report);
  }
  return time_all(all, sweep, verb, bandwidth, report);
}

}  // namespace

void add_bench(CLI::App& app, Invocation& invocation) {
  add_verb<BenchVerb>(
      app, invocation, "bench",
      "Time a layer and compare it with the memory and compute peaks of the device",
      UsesBackend::kYes, bench, [](CLI::App& verb, BenchVerb& options) {
        add_subject(verb, options.subject, true);
        verb.add_option("--tokens", options.tokens,
                        "Numbers of tokens to time, for example 1,8,64..4096:x2")
            ->capture_default_str();
        verb.add_option("--rounds", options.rounds,
                        "Number of rounds; figures are their medians. --backend and "
                        "--activation-format may be lists, and each round times all combinations")
            ->check(CLI::Range(int64_t{1}, int64_t{1000}))
            ->capture_default_str();
        verb.add_option("--seconds", options.repeat.seconds,
                        "Seconds for each token count and round; at least 5 runs")
            ->check(CLI::Range(0.0, 3600.0))
            ->capture_default_str();
        verb.add_option("--runs", options.repeat.most_runs,
                        "Most runs for each token count and round")
            ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
            ->capture_default_str();
        verb.add_flag("--steps", options.steps, "Time each step of the layer separately too");
        add_ranks(verb, options.ranks, options.over, "Time the layer over N ranks and on one");
        verb.add_option("--combine", options.combine,
                        "With --ep, how ranks exchange, a list (default: all_to_all,all_reduce)")
            ->type_name(choice_of<CombineBy>());
        verb.add_option("--routing", options.routing,
                        "With --ep, how tokens select experts, a list of uniform, zipf (some "
                        "experts are popular) and hot (only experts of rank 0) (default: all)")
            ->type_name(choice_of<RankRouting>());
        add_html(verb, options.html);
        verb.add_flag("--balance", options.balance,
                      "With --ep, time zipf and hot again with a placement of experts that "
                      "balances their load");
        verb.add_option("--slots-per-rank", options.slots_per_rank,
                        "With --balance: experts per rank; more than an even division adds copies "
                        "of busy experts (default: an even division)")
            ->check(CLI::Range(int64_t{1}, int64_t{65536}));
      });
}

}  // namespace nvfp4_moe::internal::cli
