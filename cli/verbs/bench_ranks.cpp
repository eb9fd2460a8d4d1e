// bench --ep: a layer over ranks beside the same layer on one, under routings that load the ranks evenly and not.
//
// --tokens are those of all ranks together, so that every row of a cell computes the same: under all_to_all each rank
// brings its part of them, under all_reduce all bring all, and one rank has them by itself. The backend is checked
// against the reference, and the ranks' output against one rank's, before anything is timed. Rows take turns, round after
// round.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cli/bench/host.h"
#include "cli/bench/ranks_table.h"
#include "cli/console/lists.h"
#include "cli/verbs/bench_options.h"
#include "cli/verbs/ranks.h"
#include "judge/judge.h"

namespace nvfp4_moe::cli {
namespace {

constexpr Timeout kSlowest{30 * 60 * 1000};  // for rank 0 to have done something by itself
constexpr int64_t kCheckTokens = 3;          // of each rank

template <class Enum>
Result<std::vector<Enum>> parse_enums(const std::string& list, const char* option) {
  std::vector<Enum> values;
  if (list.empty()) {
    for (size_t i = 0; i < EnumNames<Enum>::kAll.size(); ++i) values.push_back(static_cast<Enum>(i));
    return values;
  }
  const Result<std::vector<std::string>> names = parse_names(list);
  if (!names.ok()) return names.status().in(option);
  for (const std::string& name : *names) {
    NVFP4_MOE_ASSIGN(const Enum value, parse<Enum>(name, option));
    values.push_back(value);
  }
  return values;
}

// What the ranks of this process run on: cuda is the GPU of a rank's number on its host.
Result<std::string> device_of_rank(const std::string& device, const VerbRanks& ranks, int index) {
  if (device == "cuda") return fmt::format("cuda:{}", ranks.launched ? ranks.local_rank : index);
  if (device != "cpu" && !ranks.launched && ranks.ranks.world() > 1)
    return invalid_argument("--device: expected cpu, or cuda where each rank has the GPU of its number, got " + device);
  return device;
}

class RanksBench {
 public:
  RanksBench(const BenchVerb& verb, Report& report, const VerbRanks& ranks, RankHosts& hosts,
             std::vector<Configuration>& all)
      : verb_(verb), report_(report), ranks_(ranks), hosts_(hosts), all_(all), first_(ranks.ranks.has_first()) {}

  Status run(const std::vector<int64_t>& sweep, const std::vector<CombineBy>& combines,
             const std::vector<RankRouting>& routings) {
    const int64_t most_tokens = *std::max_element(sweep.begin(), sweep.end());
    NVFP4_MOE_TRY(prepare_copies(static_cast<int64_t>(combines.size())));
    NVFP4_MOE_TRY(open_all(combines, most_tokens));
    NVFP4_MOE_TRY(check_ranks());
    NVFP4_MOE_TRY(time_all(sweep, routings));
    report_.json()["ranks"] = ranks_.ranks.world();
    if (!first_) return {};
    report_.table("timings", ranks_table(cells_));
    const bool noisy = std::any_of(cells_.begin(), cells_.end(), [](const RanksCell& cell) { return is_noisy(cell); });
    report_.json()["noisy"] = noisy;
    if (noisy)
      report_.fact("note", "p90 is more than 1.5 times the fastest run: where the ranks run was busy", Style::kWarning);
    return {};
  }

 private:
  struct Layers {
    Configuration* configuration;
    std::vector<TimedRanks> combined;
  };

  // A step that this process has done by itself, to all processes: one that failed ends them all.
  Status share(const Status& mine) const {
    if (!ranks_.launched) return mine;
    return ranks_.ranks.each([&](int index) { return ranks_.ranks.exchange(index)->agree(mine, kSlowest); });
  }
  ProgressStyle progress() const {
    ProgressStyle style = report_.progress();
    style.quiet = style.quiet || !first_;
    return style;
  }

  // As many on all ranks, since a run is one of the same copy everywhere.
  Status prepare_copies(int64_t combines) {
    const auto find = [&]() -> Result<int64_t> {
      NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts(hosts_.device(0)));
      return copies_of(all_, facts, hosts_.device(0), 1 + combines);
    };
    const Result<int64_t> mine = find();
    NVFP4_MOE_TRY(share(mine.status()));
    copies_ = *mine;
    std::vector<int64_t> of_ranks(static_cast<size_t>(ranks_.ranks.world()));
    NVFP4_MOE_TRY(ranks_.ranks.each([&](int index) {
      std::vector<int64_t> all(of_ranks.size());
      const Status gathered = ranks_.ranks.exchange(index)->all_gather(&*mine, sizeof(int64_t), all.data());
      if (index == 0) of_ranks = all;
      return gathered;
    }));
    copies_ = *std::min_element(of_ranks.begin(), of_ranks.end());
    report_.json()["copies"] = copies_;
    return {};
  }

  Status open_all(const std::vector<CombineBy>& combines, int64_t most_tokens) {
    Json described = Json::array();
    const Status devices = hosts_.connect_devices();
    if (!devices.ok() && devices.code() != Code::kUnsupported) return devices;
    for (Configuration& one : all_) {
      ProgressBar bar(progress());
      Layers layers{&one, {}};
      const auto alone = [&]() -> Status {
        if (!first_) return {};
        NVFP4_MOE_ASSIGN(one.timed, TimedLayer::open(one.subject, one.backend, hosts_.device(0), most_tokens, copies_,
                                                     report_.executor(), bar.callback()));
        return {};
      };
      NVFP4_MOE_TRY(share(alone()));
      const std::string wanted = one.backend;  // alike on all ranks
      if (one.timed) one.backend = one.timed->layer().backend().name;
      for (const CombineBy combine : combines) {
        Status opened = devices;
        if (opened.ok()) {
          Result<TimedRanks> timed =
              TimedRanks::open(hosts_, one.subject, wanted, combine, most_tokens, copies_, bar.callback());
          if (timed.ok()) {
            described.push_back(Json::parse(timed->layer().describe_json()));
            layers.combined.push_back(*std::move(timed));
            continue;
          }
          opened = timed.status();
        }
        if (opened.code() != Code::kUnsupported) return opened;
        RanksCell refused;
        refused.backend = one.backend;
        refused.activation_format = one.format();
        refused.combine = to_string(combine);
        refused.refused = opened.message();
        cells_.push_back(std::move(refused));
      }
      layers_.push_back(std::move(layers));
    }
    report_.json()["describe"] = described;
    return {};
  }

  // The ranks' output of a few tokens against one rank's.
  Status check_ranks() {
    for (Layers& layers : layers_) {
      const Configuration& one = *layers.configuration;
      const MoeOptions& sizes = one.subject.options;
      NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(sizes));
      const int64_t most = std::min<int64_t>(kCheckTokens * ranks_.ranks.world(),
                                             layers.combined.empty() ? 0 : layers.combined.front().max_tokens());
      RandomTokens tokens = random_tokens(sizes, {0, sizes.num_experts}, most, verb_.subject.seed);
      for (TimedRanks& timed : layers.combined) {
        NVFP4_MOE_ASSIGN(const std::vector<uint16_t> got, timed.outputs(tokens));
        const auto compare_on_first = [&]() -> Status {
          if (!first_) return {};
          NVFP4_MOE_TRY(run_from_host(one.timed->layer(), tokens.batch()).status());
          const std::vector<float> want = tokens.out_floats();
          tokens.out = got;
          const std::vector<float> have = tokens.out_floats();
          const Comparison comparison = compare(want.data(), have.data(), most, sizes.hidden_size);
          const std::string broken = broken_limit(comparison, layer_limits(config, most));
          if (broken.empty()) return {};
          return check_failed(fmt::format("{}, {} activations, {}: not timed, because it disagrees with one rank: {}",
                                          one.backend, one.format(), to_string(timed.combine()), broken));
        };
        NVFP4_MOE_TRY(share(compare_on_first()));
      }
    }
    return {};
  }

  Status time_all(const std::vector<int64_t>& sweep, const std::vector<RankRouting>& routings) {
    ProgressBar bar(progress());
    const ProgressFn advance = bar.callback();
    Progress state;
    state.what = "bench";
    for (const Layers& layers : layers_)
      state.total += static_cast<int64_t>((1 + layers.combined.size()) * sweep.size() * routings.size()) * verb_.rounds;
    Json in_order = Json::array();
    for (const int64_t tokens : sweep)
      for (const RankRouting routing : routings) {
        const std::string item = fmt::format("{} tokens, {}", tokens, name_of(routing));
        state.item = item;
        NVFP4_MOE_TRY(time_cell(
            tokens, routing,
            [&]() -> Status {
              ++state.done;
              return advance(state) ? Status() : Status(Code::kCancelled, "interrupted");
            },
            in_order));
      }
    report_.json()["rounds"] = in_order;
    return {};
  }

  template <class Step>
  Status time_cell(int64_t tokens, RankRouting routing, const Step& step, Json& in_order) {
    const MoeOptions& sizes = all_.front().subject.options;
    NVFP4_MOE_ASSIGN(const Placement placement, Placement::contiguous(sizes.num_experts, ranks_.ranks.world()));
    batches_.reset();
    batches_ = std::make_shared<ColdBatches>(
        rank_batches(sizes, placement, routing, tokens, verb_.subject.seed, static_cast<size_t>(copies_)));
    const double busiest = busiest_over_even(*batches_, placement);
    const size_t begin = cells_.size();
    for (Layers& layers : layers_) {
      const Configuration& one = *layers.configuration;
      RanksCell cell;
      cell.backend = one.backend;
      cell.activation_format = one.format();
      cell.tokens = tokens;
      cell.routing = name_of(routing);
      cell.busiest = busiest;
      cell.on_device = hosts_.device(0) != "cpu";
      cell.combine = kOneRank;
      cells_.push_back(cell);
      if (layers.configuration->timed) NVFP4_MOE_TRY(layers.configuration->timed->prepare(batches_));
      for (TimedRanks& timed : layers.combined) {
        cell.combine = to_string(timed.combine());
        cells_.push_back(cell);
        NVFP4_MOE_TRY(timed.prepare(batches_));
      }
    }
    for (int64_t round = 0; round < verb_.rounds; ++round) {
      size_t at = begin;
      for (Layers& layers : layers_) {
        NVFP4_MOE_ASSIGN(RanksRound alone, time_alone(*layers.configuration));
        cells_[at++].rounds.push_back(std::move(alone));
        NVFP4_MOE_TRY(step());
        for (TimedRanks& timed : layers.combined) {
          NVFP4_MOE_ASSIGN(RanksRound together, timed.time(verb_.repeat));
          cells_[at++].rounds.push_back(std::move(together));
          NVFP4_MOE_TRY(step());
        }
      }
      for (size_t i = begin; i < cells_.size() && first_; ++i)
        in_order.push_back(ranks_round_json(cells_[i], static_cast<size_t>(round)));
    }
    return {};
  }

  // The whole layer on rank 0, while the others wait.
  Result<RanksRound> time_alone(Configuration& one) {
    RanksRound round;
    const auto time = [&]() -> Status {
      if (!first_) return {};
      NVFP4_MOE_ASSIGN(const RunTimes times, one.timed->time_runs(verb_.repeat));
      round.slowest_us = times.us;
      round.ranks.emplace_back();
      for (const double us : times.us) round.ranks.front().push_back({us, {}, {}});
      return {};
    };
    NVFP4_MOE_TRY(share(time()));
    return round;
  }

  const BenchVerb& verb_;
  Report& report_;
  const VerbRanks& ranks_;
  RankHosts& hosts_;
  std::vector<Configuration>& all_;
  const bool first_;
  int64_t copies_ = 1;
  std::vector<Layers> layers_;  // by configuration
  std::vector<RanksCell> cells_;
  std::shared_ptr<ColdBatches> batches_;  // of the cell
};

}  // namespace

Status bench_ranks(const BenchVerb& verb, Report& report) {
  if (verb.steps || !verb.subject.part.expert_range.empty() || !verb.subject.part.intermediate_slice.empty())
    return invalid_argument("--ep: expected neither --steps, --expert-range nor --intermediate-slice beside it");
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> sweep, token_sweep(verb));
  NVFP4_MOE_ASSIGN(const std::vector<CombineBy> combines, parse_enums<CombineBy>(verb.combine, "--combine"));
  NVFP4_MOE_ASSIGN(const std::vector<RankRouting> routings, parse_enums<RankRouting>(verb.routing, "--routing"));
  NVFP4_MOE_ASSIGN(std::vector<Configuration> all, configurations(verb, report));
  // Of a shape that is one rank's part, the whole model's experts: the ranks divide them.
  for (Configuration& one : all) one.subject.range = {0, one.subject.options.num_experts};
  const Subject& subject = all.front().subject;
  NVFP4_MOE_TRY(Placement::contiguous(subject.options.num_experts, verb.ranks).status().in("--ep"));
  NVFP4_MOE_ASSIGN(const VerbRanks ranks, connect_ranks(verb.ranks));
  NVFP4_MOE_TRY(device_of_rank(report.common().device, ranks, 0).status());
  const int threads = std::max(1, static_cast<int>(report.executor().threads()) / ranks.ranks.here());
  NVFP4_MOE_ASSIGN(
      RankHosts hosts,
      RankHosts::make(
          ranks.ranks, [&](int index) { return device_of_rank(report.common().device, ranks, index).value(); },
          threads));
  const bool first = ranks.ranks.has_first();
  report.json()["layer"] = subject.name;
  report.json()["over"] = ranks.over();
  report.json()["rank"] = ranks.ranks.first_rank();
  const HostFacts host = read_host();
  report.json()["host"] = {{"cpu", host.cpu},
                           {"threads", report.executor().threads()},
                           {"threads_per_rank", threads},
                           {"available_threads", host.threads}};
  report.json()["device"] = {{"name", report.common().device}};
  if (first) {
    report.fact("layer", sizes_text(subject));
    report.fact("ranks", fmt::format("{} {} of {} thread{} each; one rank: {}", ranks.ranks.world(), ranks.over(),
                                     threads, threads == 1 ? "" : "s", report.executor().threads()));
    report.fact("host", fmt::format("{}, {} threads", host.cpu, host.threads));
  }
  NVFP4_MOE_ASSIGN(const bool agree, check_all(all, hosts.device(0), verb.subject.seed, report));
  report.json()["checked"] = agree;
  if (!agree) return {};
  return RanksBench(verb, report, ranks, hosts, all).run(sweep, combines, routings);
}

}  // namespace nvfp4_moe::cli
