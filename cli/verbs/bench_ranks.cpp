// bench --ep: times a layer over ranks and the same layer on one rank, with routings that load the
// ranks evenly and unevenly.
//
// --tokens counts the tokens of all ranks together, so that every row of a cell computes the same:
// with all_to_all each rank has a part of them, with all_reduce each rank has all of them. Before
// timing, the backend is checked against the reference, and the ranks' output against one rank's.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/bench/host.h"
#include "cli/console/lists.h"
#include "cli/verbs/ranks_bench.h"

namespace nvfp4_moe::internal::cli {
namespace {

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

// threads: the threads of this process.
Result<std::unique_ptr<RanksWay>> make_way(int world, const std::string& device, int threads) {
  NVFP4_MOE_ASSIGN(VerbRanks connected, connect_ranks(world));
  NVFP4_MOE_TRY(device_of_rank(device, connected, 0).status());
  std::unique_ptr<RanksWay> way(new RanksWay{{}, std::move(connected), {}, {}});
  const VerbRanks& ranks = way->ranks;
  NVFP4_MOE_ASSIGN(
      RankHosts hosts,
      RankHosts::make(
          ranks.ranks, [&](int index) { return device_of_rank(device, ranks, index).value(); },
          std::max(1, threads / ranks.ranks.here())));
  way->hosts.emplace(std::move(hosts));
  return way;
}

}  // namespace

Status bench_ranks(const BenchVerb& verb, Report& report) {
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
  NVFP4_MOE_ASSIGN(const std::vector<RanksOver> overs, parse_over(verb.over, device));
  NVFP4_MOE_ASSIGN(std::vector<Configuration> all, configurations(verb, report));
  // A shape may be one rank's part. The ranks here divide all experts of the model.
  for (Configuration& one : all) one.subject.range = {0, one.subject.options.num_experts};
  const Subject& subject = all.front().subject;
  NVFP4_MOE_TRY(Placement::contiguous(subject.options.num_experts, verb.ranks).status().in("--ep"));
  const auto threads = static_cast<int>(report.executor().threads());
  std::vector<std::unique_ptr<RanksWay>> ways;
  for (const RanksOver over : overs) {
    NVFP4_MOE_ASSIGN(auto way, make_way(verb.ranks, device, threads));
    way->over = over;
    ways.push_back(std::move(way));
  }
  if (ways.empty()) {
    NVFP4_MOE_ASSIGN(auto way, make_way(verb.ranks, device, threads));
    ways.push_back(std::move(way));
  }
  const VerbRanks& ranks = ways.front()->ranks;
  const RankHosts& hosts = *ways.front()->hosts;
  const bool first = ranks.ranks.has_first();
  report.json()["layer"] = subject.name;
  report.json()["over"] = ranks.over();
  report.json()["rank"] = ranks.ranks.first_rank();
  const HostFacts host = read_host();
  report.json()["host"] = {{"cpu", host.cpu},
                           {"threads", threads},
                           {"threads_per_rank", hosts.threads()},
                           {"available_threads", host.threads}};
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts(hosts.device(0)));
  const bool on_device = facts.kind == DeviceKind::kCuda;
  report.json()["device"] = {{"name", device},
                             {"model", on_device ? Json(facts.name) : Json(nullptr)}};
  if (first) {
    report.fact("layer", sizes_text(subject));
    report.fact("ranks", fmt::format("{} {} of {} thread{} each; one rank: {}", ranks.ranks.world(),
                                     ranks.over(), hosts.threads(), hosts.threads() == 1 ? "" : "s",
                                     threads));
    report.fact("host", fmt::format("{}, {} threads", host.cpu, host.threads));
    if (on_device) report.fact("device", fmt::format("{}, one for each rank", facts.name));
  }
  NVFP4_MOE_ASSIGN(const bool agree, check_all(all, hosts.device(0), verb.subject.seed, report));
  report.json()["checked"] = agree;
  if (!agree) return {};
  for (const auto& way : ways) {
    if (way->over) way->connected = way->hosts->connect_devices(*way->over);
    if (!way->connected.ok() && way->connected.code() != Code::kUnsupported) return way->connected;
  }
  return RanksBench(verb, report, ways, all).run(sweep, combines, routings);
}

}  // namespace nvfp4_moe::internal::cli
