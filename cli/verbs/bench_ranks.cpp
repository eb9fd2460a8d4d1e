// bench --ep: times a layer over ranks and the same layer on one rank, with routings that load the
// ranks evenly and unevenly.
//
// --tokens counts the tokens of all ranks together, so that every row of a cell computes the same:
// with all_to_all each rank has a part of them, with all_reduce each rank has all of them. Before
// timing, the backend is checked against the reference, and the ranks' output against one rank's.
//
// A cell is a number of tokens and a routing. Each round times all its rows:
// - the layer on one rank,
// - the ranks' own experts without an exchange,
// - the layer over ranks, for each --combine,
// - with --balance the same again, with a placement proposed from the cell's load.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/bench/host.h"
#include "cli/bench/ranks_table.h"
#include "cli/console/lists.h"
#include "cli/verbs/bench_options.h"
#include "cli/verbs/output_option.h"
#include "cli/verbs/ranks.h"
#include "judge/judge.h"
#include "parallel/balance.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr Timeout kSlowest{30 * 60 * 1000};  // while the others wait for rank 0
constexpr int64_t kCheckTokens = 3;          // per rank

template <class Enum>
Result<std::vector<Enum>> parse_enums(const std::string& list, const char* option) {
  std::vector<Enum> values;
  if (list.empty()) {
    for (size_t i = 0; i < EnumNames<Enum>::kAll.size(); ++i)
      values.push_back(static_cast<Enum>(i));
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

// Whether the ranks' own experts, without an exchange, compute the same as the layer's ranks. A
// shared expert runs on the token's source rank with all_to_all, but on rank 0 with all_reduce and
// in the own experts.
bool same_work(const Configuration& one, CombineBy combine) {
  return one.subject.options.shared_intermediate_size == 0 || combine == CombineBy::kAllReduce;
}

class RanksBench {
 public:
  // all: the configurations to time.
  RanksBench(const BenchVerb& verb, Report& report, const VerbRanks& ranks,
             std::optional<RanksOver> over, RankHosts& hosts, std::vector<Configuration>& all)
      : verb_(verb),
        report_(report),
        ranks_(ranks),
        over_(over),
        hosts_(hosts),
        all_(all),
        first_(local().has_first()) {}

  Status run(const std::vector<int64_t>& sweep, const std::vector<CombineBy>& combines,
             const std::vector<RankRouting>& routings) {
    NVFP4_MOE_TRY(choose_slots());
    NVFP4_MOE_TRY(choose_copies(combines.size()));
    NVFP4_MOE_TRY(open_all(combines, *std::max_element(sweep.begin(), sweep.end())));
    NVFP4_MOE_TRY(time_all(sweep, routings));
    report_.json()["ranks"] = world();
    if (!first_) return {};
    report_.table("timings", ranks_table(cells_));
    const bool noisy = std::any_of(cells_.begin(), cells_.end(), is_noisy);
    report_.json()["noisy"] = noisy;
    if (noisy)
      report_.fact("note",
                   "p90 is more than 1.5 times the fastest run: where the ranks run was busy",
                   Style::kWarning);
    return {};
  }

 private:
  // A layer over ranks.
  struct Divided {
    Configuration* one;
    bool balanced;
    TimedRanks timed;
  };
  // The subject of a cell's row: the configuration on one rank, or over ranks.
  struct Row {
    Configuration* one;
    Divided* divided;  // null: one rank
    RanksWork work;
  };

  const LocalRanks& local() const { return ranks_.ranks; }
  int world() const { return local().world(); }
  int64_t experts() const { return all_.front().subject.options.num_experts; }
  // Shares the status of a step that this process did alone. A failure ends all processes.
  Status share(const Status& mine) const {
    if (!ranks_.launched) return mine;
    return local().exchange(0)->agree(mine, kSlowest);
  }

  Status choose_slots();
  Status choose_copies(size_t combines);
  Status open_all(const std::vector<CombineBy>& combines, int64_t most_tokens);
  // Compares the ranks' output for a few tokens with one rank's.
  Status check(const Configuration& one, TimedRanks& timed) const;
  std::vector<Row> rows_of(RankRouting routing);
  RanksCell cell_of(const Row& row, int64_t tokens, RankRouting routing) const;
  Status time_all(const std::vector<int64_t>& sweep, const std::vector<RankRouting>& routings);
  Status prepare(const std::vector<Row>& rows);
  Result<RanksRound> time(const Row& row) const;

  const BenchVerb& verb_;
  Report& report_;
  const VerbRanks& ranks_;
  const std::optional<RanksOver> over_;
  RankHosts& hosts_;
  std::vector<Configuration>& all_;
  const bool first_;
  int64_t slots_per_rank_ = 0;  // 0: no --balance
  int64_t copies_ = 1;
  std::vector<Divided> divided_;
  std::vector<RanksCell> cells_;
  std::shared_ptr<ColdBatches> batches_;  // the cell's
};

Status RanksBench::choose_slots() {
  if (verb_.slots_per_rank && !verb_.balance)
    return invalid_argument("--slots-per-rank: expected --balance too");
  report_.json()["slots_per_rank"] = nullptr;
  if (!verb_.balance) return {};
  slots_per_rank_ = verb_.slots_per_rank.value_or((experts() + world() - 1) / world());
  report_.json()["slots_per_rank"] = slots_per_rank_;
  return {};
}

// The same number on all ranks, because a run uses the same copy everywhere.
Status RanksBench::choose_copies(size_t combines) {
  const std::string& device = hosts_.device(0);
  // A GPU holds one rank's part of each layer over ranks, and rank 0's GPU also the whole layer. A
  // host holds everything.
  const double parts = device == "cpu" ? 1 : 1.0 / world();
  const double balanced =
      parts * static_cast<double>(slots_per_rank_ * world()) / static_cast<double>(experts());
  const double layers_each = 1 + static_cast<double>(combines) * (parts + balanced);
  const auto find = [&]() -> Result<int64_t> {
    NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts(device));
    return copies_of(all_, facts, device, layers_each);
  };
  const Result<int64_t> mine = find();
  NVFP4_MOE_TRY(share(mine.status()));
  std::vector<int64_t> of_ranks(static_cast<size_t>(world()), *mine);
  if (ranks_.launched)
    NVFP4_MOE_TRY(local().exchange(0)->all_gather(&*mine, sizeof(int64_t), of_ranks.data()));
  copies_ = *std::min_element(of_ranks.begin(), of_ranks.end());
  report_.json()["copies"] = copies_;
  return {};
}

Status RanksBench::open_all(const std::vector<CombineBy>& combines, int64_t most_tokens) {
  std::vector<std::optional<Placement>> placements = {std::nullopt};  // contiguous
  if (slots_per_rank_ > 0) {  // even, until a cell's load is known
    const std::vector<uint64_t> equal(static_cast<size_t>(experts()), 1);
    const auto even = propose_placement(equal, world(), slots_per_rank_);
    NVFP4_MOE_TRY(even.status().in("--slots-per-rank"));
    placements.emplace_back(*even);
  }
  divided_.reserve(all_.size() * placements.size() * combines.size());
  Json described = Json::array();
  for (Configuration& one : all_) {
    ProgressBar bar(progress_of(ranks_, report_.progress()));
    const auto alone = [&]() -> Status {
      if (!first_) return {};
      NVFP4_MOE_ASSIGN(one.timed,
                       TimedLayer::open(one.subject, one.backend, hosts_.device(0), most_tokens,
                                        copies_, report_.executor(), bar.callback()));
      return {};
    };
    NVFP4_MOE_TRY(share(alone()));
    const std::string wanted = one.backend;  // the same on all ranks
    if (one.timed) one.backend = one.timed->layer().backend().name;
    for (const auto& placement : placements)
      for (const CombineBy combine : combines) {
        NVFP4_MOE_ASSIGN(
            TimedRanks timed,
            TimedRanks::open(hosts_, one.subject, wanted,
                             {combine, most_tokens, copies_, placement}, bar.callback()));
        described.push_back(Json::parse(timed.layer().describe_json()));
        NVFP4_MOE_TRY(check(one, timed));
        divided_.push_back({&one, placement.has_value(), std::move(timed)});
      }
  }
  report_.json()["describe"] = described;
  return {};
}

Status RanksBench::check(const Configuration& one, TimedRanks& timed) const {
  const MoeOptions& sizes = one.subject.options;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(sizes));
  const int64_t most = std::min<int64_t>(kCheckTokens * world(), timed.max_tokens());
  RandomTokens tokens = random_tokens(sizes, {0, sizes.num_experts}, most, verb_.subject.seed);
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
    return check_failed(
        fmt::format("{}, {} activations, {}: not timed, because it disagrees with one rank: {}",
                    one.backend, one.format(), to_string(timed.combine()), broken));
  };
  return share(compare_on_first());
}

std::vector<RanksBench::Row> RanksBench::rows_of(RankRouting routing) {
  std::vector<Row> rows;
  for (Configuration& one : all_) {
    rows.push_back({&one, nullptr, RanksWork::kLayer});
    for (const bool balanced : {false, true}) {
      if (balanced && routing == RankRouting::kUniform) continue;  // its load is already even
      Divided* own = nullptr;
      std::vector<Row> layers;
      for (Divided& divided : divided_) {
        if (divided.one != &one || divided.balanced != balanced) continue;
        if (own == nullptr && same_work(one, divided.timed.combine())) own = &divided;
        layers.push_back({&one, &divided, RanksWork::kLayer});
      }
      if (own != nullptr) rows.push_back({&one, own, RanksWork::kOwnExperts});
      rows.insert(rows.end(), layers.begin(), layers.end());
    }
  }
  return rows;
}

RanksCell RanksBench::cell_of(const Row& row, int64_t tokens, RankRouting routing) const {
  const MoeOptions& sizes = row.one->subject.options;
  RanksCell cell;
  cell.backend = row.one->backend;
  cell.activation_format = row.one->format();
  cell.tokens = tokens;
  cell.routing = name_of(routing);
  cell.on_device = over_.has_value();
  cell.combine = kOneRank;
  if (row.divided == nullptr) {
    const Placement even = Placement::contiguous(sizes.num_experts, world()).value();
    cell.busiest = busiest_over_even(*batches_, sizes.top_k, even, CombineBy::kAllToAll);
    return cell;
  }
  const TimedRanks& timed = row.divided->timed;
  cell.busiest = busiest_over_even(*batches_, sizes.top_k, timed.placement(), timed.combine());
  cell.placement = row.divided->balanced ? "balanced" : "contiguous";
  cell.combine = kOwnExperts;
  if (row.work == RanksWork::kOwnExperts) return cell;
  cell.combine = to_string(timed.combine());
  cell.same_work = same_work(*row.one, timed.combine());
  if (over_) cell.over = name_of(*over_);
  return cell;
}

Status RanksBench::time_all(const std::vector<int64_t>& sweep,
                            const std::vector<RankRouting>& routings) {
  ProgressBar bar(progress_of(ranks_, report_.progress()));
  const ProgressFn advance = bar.callback();
  Progress state;
  state.what = "bench";
  for (const RankRouting routing : routings)
    state.total += static_cast<int64_t>(rows_of(routing).size() * sweep.size()) * verb_.rounds;
  NVFP4_MOE_ASSIGN(const Placement even, Placement::contiguous(experts(), world()));
  for (const int64_t tokens : sweep)
    for (const RankRouting routing : routings) {
      const std::string item = fmt::format("{} tokens, {}", tokens, name_of(routing));
      state.item = item;
      batches_.reset();  // frees the old batches before new ones are made
      batches_ = std::make_shared<ColdBatches>(rank_batches(all_.front().subject.options, even,
                                                            routing, tokens, verb_.subject.seed,
                                                            static_cast<size_t>(copies_)));
      const std::vector<Row> rows = rows_of(routing);
      NVFP4_MOE_TRY(prepare(rows));
      const size_t begin = cells_.size();
      for (const Row& row : rows) cells_.push_back(cell_of(row, tokens, routing));
      for (int64_t round = 0; round < verb_.rounds; ++round)
        for (size_t at = 0; at < rows.size(); ++at) {
          NVFP4_MOE_ASSIGN(RanksRound timed, time(rows[at]));
          cells_[begin + at].rounds.push_back(std::move(timed));
          ++state.done;
          if (!advance(state)) return Status(Code::kCancelled, "interrupted");
        }
    }
  return {};
}

Status RanksBench::prepare(const std::vector<Row>& rows) {
  std::optional<Placement> proposed;
  if (slots_per_rank_ > 0) {
    const std::vector<uint64_t> load = load_of(*batches_, experts());
    NVFP4_MOE_ASSIGN(proposed, propose_placement(load, world(), slots_per_rank_));
  }
  for (const Row& row : rows) {
    if (row.divided == nullptr && row.one->timed) NVFP4_MOE_TRY(row.one->timed->prepare(batches_));
    if (row.divided == nullptr || row.work == RanksWork::kOwnExperts) continue;
    TimedRanks& timed = row.divided->timed;
    if (row.divided->balanced) {
      NVFP4_MOE_TRY(timed.rearrange(*proposed, row.one->subject.source));
      NVFP4_MOE_TRY(check(*row.one, timed));
    }
    const bool own_experts = std::any_of(rows.begin(), rows.end(), [&](const Row& other) {
      return other.divided == row.divided && other.work == RanksWork::kOwnExperts;
    });
    NVFP4_MOE_TRY(timed.prepare(batches_, own_experts));
  }
  return {};
}

Result<RanksRound> RanksBench::time(const Row& row) const {
  if (row.divided != nullptr) return row.divided->timed.time(verb_.repeat, row.work);
  RanksRound round;
  const auto time_alone = [&]() -> Status {  // on rank 0 while the others wait
    if (!first_) return {};
    NVFP4_MOE_ASSIGN(const RunTimes times, row.one->timed->time_runs(verb_.repeat));
    round.us = times.us;
    round.rank_us = {median(times.us)};
    return {};
  };
  NVFP4_MOE_TRY(share(time_alone()));
  return round;
}

}  // namespace

Status bench_ranks(const BenchVerb& verb, const std::string& page, Report& report) {
  if (verb.steps || !verb.subject.part.expert_range.empty() ||
      !verb.subject.part.intermediate_slice.empty())
    return invalid_argument(
        "--ep: expected none of --steps, --expert-range and --intermediate-slice with it");
  const std::string& device = report.common().device;
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> sweep, token_sweep(verb));
  NVFP4_MOE_ASSIGN(const std::vector<CombineBy> combines,
                   parse_enums<CombineBy>(verb.combine, "--combine"));
  NVFP4_MOE_ASSIGN(const std::vector<RankRouting> routings,
                   parse_enums<RankRouting>(verb.routing, "--routing"));
  NVFP4_MOE_ASSIGN(const std::optional<RanksOver> over, parse_over(verb.over, device));
  NVFP4_MOE_ASSIGN(std::vector<Configuration> all, configurations(verb, report));
  // A shape may be one rank's part. The ranks here divide all experts of the model.
  for (Configuration& one : all) one.subject.range = {0, one.subject.options.num_experts};
  const Subject& subject = all.front().subject;
  NVFP4_MOE_TRY(Placement::contiguous(subject.options.num_experts, verb.ranks).status().in("--ep"));
  const auto threads = static_cast<int>(report.executor().threads());
  NVFP4_MOE_ASSIGN(const VerbRanks ranks, connect_ranks(verb.ranks, device));
  RankHosts hosts(
      ranks.ranks, [&](int index) { return ranks.device_of(device, index); },
      std::max(1, threads / ranks.ranks.here()));
  const bool first = ranks.ranks.has_first();
  begin_page(first ? page : "", report);
  const char* const kind = ranks.launched ? "processes" : "threads";
  report.json()["layer"] = subject.name;
  report.json()["over"] = kind;
  report.json()["rank"] = ranks.ranks.first_rank();
  const HostFacts host = read_host();
  report.json()["host"] = {{"cpu", host.cpu},
                           {"threads", threads},
                           {"threads_per_rank", hosts.threads()},
                           {"available_threads", host.threads}};
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts(hosts.device(0)));
  report.json()["device"] = {{"name", device}, {"model", over ? Json(facts.name) : Json(nullptr)}};
  if (first) {
    report.fact("layer", sizes_text(subject));
    report.fact("ranks", fmt::format("{} {} of {} thread{} each; one rank: {}", verb.ranks, kind,
                                     hosts.threads(), hosts.threads() == 1 ? "" : "s", threads));
    report.fact("host", fmt::format("{}, {} threads", host.cpu, host.threads));
    if (over)
      report.fact("device",
                  fmt::format("{}, one for each rank, over {}", facts.name, name_of(*over)));
  }
  NVFP4_MOE_ASSIGN(const bool agree, check_all(all, hosts.device(0), verb.subject.seed, report));
  report.json()["checked"] = agree;
  if (!agree) return {};
  if (over) NVFP4_MOE_TRY(connect_devices(ranks, device, *over));
  return RanksBench(verb, report, ranks, over, hosts, all).run(sweep, combines, routings);
}

}  // namespace nvfp4_moe::internal::cli
