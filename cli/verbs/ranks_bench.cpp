#include "cli/verbs/ranks_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/bench/host.h"
#include "judge/judge.h"
#include "parallel/balance.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr Timeout kSlowest{30 * 60 * 1000};  // while the others wait for rank 0
constexpr int64_t kCheckTokens = 3;          // per rank

// Whether the ranks' own experts, without an exchange, compute the same as the layer's ranks. A
// shared expert runs on the token's source rank with all_to_all, but on rank 0 with all_reduce and
// in the own experts.
bool same_work(const Configuration& one, CombineBy combine) {
  return one.subject.options.shared_intermediate_size == 0 || combine == CombineBy::kAllReduce;
}

}  // namespace

RanksBench::RanksBench(const BenchVerb& verb, Report& report,
                       const std::vector<std::unique_ptr<RanksWay>>& ways,
                       std::vector<Configuration>& all)
    : verb_(verb), report_(report), ways_(ways), all_(all), first_(ranks().has_first()) {}

Status RanksBench::run(const std::vector<int64_t>& sweep, const std::vector<CombineBy>& combines,
                       const std::vector<RankRouting>& routings) {
  const int64_t most_tokens = *std::max_element(sweep.begin(), sweep.end());
  NVFP4_MOE_TRY(choose_slots());
  NVFP4_MOE_TRY(prepare_copies(combines.size()));
  NVFP4_MOE_TRY(open_all(combines, most_tokens));
  NVFP4_MOE_TRY(time_all(sweep, routings));
  report_.json()["ranks"] = ranks().world();
  if (!first_) return {};
  report_.table("timings", ranks_table(cells_));
  const bool noisy = std::any_of(cells_.begin(), cells_.end(),
                                 [](const RanksCell& cell) { return is_noisy(cell); });
  report_.json()["noisy"] = noisy;
  if (noisy)
    report_.fact("note", "p90 is more than 1.5 times the fastest run: where the ranks run was busy",
                 Style::kWarning);
  return {};
}

Status RanksBench::share(const Status& mine) const {
  if (!ways_.front()->ranks.launched) return mine;
  return ranks().each([&](int index) { return ranks().exchange(index)->agree(mine, kSlowest); });
}

ProgressStyle RanksBench::progress() const {
  ProgressStyle style = report_.progress();
  style.quiet = style.quiet || !first_;
  return style;
}

Status RanksBench::choose_slots() {
  if (verb_.slots_per_rank && !verb_.balance)
    return invalid_argument("--slots-per-rank: expected --balance too");
  report_.json()["slots_per_rank"] = nullptr;
  if (!verb_.balance) return {};
  const int64_t even = (experts() + ranks().world() - 1) / ranks().world();
  slots_per_rank_ = verb_.slots_per_rank.value_or(even);
  report_.json()["slots_per_rank"] = slots_per_rank_;
  const std::vector<uint64_t> alike(static_cast<size_t>(experts()), 1);
  return propose_placement(alike, ranks().world(), slots_per_rank_).status().in("--slots-per-rank");
}

// The same number on all ranks, because a run uses the same copy everywhere.
Status RanksBench::prepare_copies(size_t combines) {
  const std::string& device = hosts().device(0);
  // A GPU holds one rank's part of each layer over ranks, and rank 0's GPU also the whole layer. A
  // host holds everything.
  const auto world = static_cast<double>(ranks().world());
  const double parts = device == "cpu" ? 1 : 1 / world;
  const double balanced =
      parts * static_cast<double>(slots_per_rank_) * world / static_cast<double>(experts());
  const double layers_each = 1 + static_cast<double>(ways_.size() * combines) * (parts + balanced);
  const auto find = [&]() -> Result<int64_t> {
    NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts(device));
    return copies_of(all_, facts, device, layers_each);
  };
  const Result<int64_t> mine = find();
  NVFP4_MOE_TRY(share(mine.status()));
  copies_ = *mine;
  std::vector<int64_t> of_ranks(static_cast<size_t>(ranks().world()));
  NVFP4_MOE_TRY(ranks().each([&](int index) {
    std::vector<int64_t> all(of_ranks.size());
    const Status gathered =
        ranks().exchange(index)->all_gather(&*mine, sizeof(int64_t), all.data());
    if (index == 0) of_ranks = all;
    return gathered;
  }));
  copies_ = *std::min_element(of_ranks.begin(), of_ranks.end());
  report_.json()["copies"] = copies_;
  return {};
}

Status RanksBench::open_all(const std::vector<CombineBy>& combines, int64_t most_tokens) {
  Json described = Json::array();
  for (Configuration& one : all_) {
    ProgressBar bar(progress());
    layers_.push_back({&one, {}});
    const auto alone = [&]() -> Status {
      if (!first_) return {};
      NVFP4_MOE_ASSIGN(one.timed,
                       TimedLayer::open(one.subject, one.backend, hosts().device(0), most_tokens,
                                        copies_, report_.executor(), bar.callback()));
      return {};
    };
    NVFP4_MOE_TRY(share(alone()));
    const std::string wanted = one.backend;  // the same on all ranks
    if (one.timed) one.backend = one.timed->layer().backend().name;
    for (const bool balanced : {false, true}) {
      if (balanced && slots_per_rank_ == 0) continue;
      std::optional<Placement> placement;
      if (balanced) {  // a placeholder until a cell's load is known
        const std::vector<uint64_t> alike(static_cast<size_t>(experts()), 1);
        NVFP4_MOE_ASSIGN(placement, propose_placement(alike, ranks().world(), slots_per_rank_));
      }
      for (const auto& way : ways_)
        for (const CombineBy combine : combines)
          NVFP4_MOE_TRY(open_over(layers_.back(), *way, wanted,
                                  {combine, most_tokens, copies_, placement}, bar.callback(),
                                  described));
    }
  }
  report_.json()["describe"] = described;
  return {};
}

Status RanksBench::open_over(Layers& layers, RanksWay& way, const std::string& backend,
                             const RanksLayer& divided, const ProgressFn& progress,
                             Json& described) {
  const Configuration& one = *layers.configuration;
  Status opened = way.connected;
  if (opened.ok()) {
    Result<TimedRanks> timed =
        TimedRanks::open(*way.hosts, one.subject, backend, divided, progress);
    if (timed.ok()) {
      described.push_back(Json::parse(timed->layer().describe_json()));
      layers.divided.push_back({&way, divided.placement.has_value(), *std::move(timed)});
      return check(one, layers.divided.back().timed);
    }
    opened = timed.status();
  }
  if (opened.code() != Code::kUnsupported) return opened;
  if (divided.placement) return {};  // the contiguous row reports it
  RanksCell refused;
  refused.backend = one.backend;
  refused.activation_format = one.format();
  refused.combine = to_string(divided.combine);
  if (way.over) refused.over = name_of(*way.over);
  refused.refused = opened.message();
  cells_.push_back(std::move(refused));
  return {};
}

Status RanksBench::check(const Configuration& one, TimedRanks& timed) const {
  const MoeOptions& sizes = one.subject.options;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(sizes));
  const int64_t most = std::min<int64_t>(kCheckTokens * ranks().world(), timed.max_tokens());
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
  for (Layers& layers : layers_) {
    Configuration& one = *layers.configuration;
    rows.push_back({&one, nullptr, RanksWork::kLayer});
    for (const bool balanced : {false, true}) {
      if (balanced && routing == RankRouting::kUniform) continue;  // its load is already even
      const auto own =
          std::find_if(layers.divided.begin(), layers.divided.end(), [&](const Divided& divided) {
            return divided.balanced == balanced && same_work(one, divided.timed.combine());
          });
      if (own != layers.divided.end()) rows.push_back({&one, &*own, RanksWork::kOwnExperts});
      for (Divided& divided : layers.divided)
        if (divided.balanced == balanced) rows.push_back({&one, &divided, RanksWork::kLayer});
    }
  }
  return rows;
}

RanksCell RanksBench::cell_of(const Row& row, int64_t tokens, RankRouting routing) const {
  const MoeOptions& sizes = row.configuration->subject.options;
  RanksCell cell;
  cell.backend = row.configuration->backend;
  cell.activation_format = row.configuration->format();
  cell.tokens = tokens;
  cell.routing = name_of(routing);
  cell.on_device = hosts().device(0) != "cpu";
  cell.combine = kOneRank;
  if (row.divided == nullptr) {
    const Placement even = Placement::contiguous(sizes.num_experts, ranks().world()).value();
    cell.busiest = busiest_over_even(*batches_, sizes.top_k, even, CombineBy::kAllToAll);
    return cell;
  }
  const TimedRanks& timed = row.divided->timed;
  cell.busiest = busiest_over_even(*batches_, sizes.top_k, timed.placement(), timed.combine());
  cell.placement = row.divided->balanced ? "balanced" : "contiguous";
  cell.combine = kOwnExperts;
  if (row.work == RanksWork::kOwnExperts) return cell;
  cell.combine = to_string(timed.combine());
  cell.same_work = same_work(*row.configuration, timed.combine());
  if (row.divided->way->over) cell.over = name_of(*row.divided->way->over);
  return cell;
}

Status RanksBench::time_all(const std::vector<int64_t>& sweep,
                            const std::vector<RankRouting>& routings) {
  ProgressBar bar(progress());
  const ProgressFn advance = bar.callback();
  Progress state;
  state.what = "bench";
  for (const RankRouting routing : routings)
    state.total += static_cast<int64_t>(rows_of(routing).size() * sweep.size()) * verb_.rounds;
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
Status RanksBench::time_cell(int64_t tokens, RankRouting routing, const Step& step,
                             Json& in_order) {
  NVFP4_MOE_ASSIGN(const Placement placement, Placement::contiguous(experts(), ranks().world()));
  batches_.reset();
  batches_ = std::make_shared<ColdBatches>(rank_batches(all_.front().subject.options, placement,
                                                        routing, tokens, verb_.subject.seed,
                                                        static_cast<size_t>(copies_)));
  const std::vector<Row> rows = rows_of(routing);
  NVFP4_MOE_TRY(prepare(rows));
  const size_t begin = cells_.size();
  for (const Row& row : rows) cells_.push_back(cell_of(row, tokens, routing));
  for (int64_t round = 0; round < verb_.rounds; ++round) {
    for (size_t at = 0; at < rows.size(); ++at) {
      NVFP4_MOE_ASSIGN(RanksRound timed, time(rows[at]));
      cells_[begin + at].rounds.push_back(std::move(timed));
      NVFP4_MOE_TRY(step());
    }
    for (size_t at = begin; at < cells_.size() && first_; ++at)
      in_order.push_back(ranks_round_json(cells_[at], static_cast<size_t>(round)));
  }
  return {};
}

Status RanksBench::prepare(const std::vector<Row>& rows) {
  std::optional<Placement> proposed;
  for (const Row& row : rows) {
    Configuration& one = *row.configuration;
    if (row.divided == nullptr && one.timed) NVFP4_MOE_TRY(one.timed->prepare(batches_));
    if (row.divided == nullptr || row.work == RanksWork::kOwnExperts) continue;
    TimedRanks& timed = row.divided->timed;
    if (row.divided->balanced) {
      if (!proposed) {
        const std::vector<uint64_t> load = load_of(*batches_, experts());
        NVFP4_MOE_ASSIGN(proposed, propose_placement(load, ranks().world(), slots_per_rank_));
      }
      NVFP4_MOE_TRY(timed.rearrange(*proposed, one.subject.source));
      NVFP4_MOE_TRY(check(one, timed));
    }
    const bool own_experts = std::any_of(rows.begin(), rows.end(), [&](const Row& other) {
      return other.divided == row.divided && other.work == RanksWork::kOwnExperts;
    });
    NVFP4_MOE_TRY(timed.prepare(batches_, own_experts));
  }
  return {};
}

Result<RanksRound> RanksBench::time(const Row& row) const {
  return row.divided == nullptr ? time_alone(*row.configuration)
                                : row.divided->timed.time(verb_.repeat, row.work);
}

Result<RanksRound> RanksBench::time_alone(Configuration& one) const {
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

}  // namespace nvfp4_moe::internal::cli
