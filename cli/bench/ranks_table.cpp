#include "cli/bench/ranks_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/console/lists.h"

namespace nvfp4_moe::internal::cli {
namespace {

double median_us(const RanksRound& round) { return median(round.slowest_us); }
double p90_us(const RanksRound& round) {
  return round.slowest_us[static_cast<size_t>(
      0.9 * static_cast<double>(round.slowest_us.size() - 1) + 0.5)];
}

template <class Value>
double over_rounds(const RanksCell& of, const Value& value) {
  std::vector<double> values;
  for (const RanksRound& round : of.rounds) values.push_back(value(round));
  return median(std::move(values));
}

// For each rank, the median over the rounds of value(round, rank).
template <class Value>
std::vector<double> by_rank(const RanksCell& of, const Value& value) {
  std::vector<double> values;
  for (size_t rank = 0; rank < of.rounds.front().ranks.size(); ++rank)
    values.push_back(over_rounds(of, [&](const RanksRound& round) { return value(round, rank); }));
  return values;
}

double of_all(const RanksCell& of) { return over_rounds(of, median_us); }

// The cell of `combine` (and of that placement) with otherwise the same parameters, or null.
const RanksCell* beside(const RanksCell& of, const std::vector<RanksCell>& cells,
                        const std::string& combine, const std::string& placement) {
  const auto found = std::find_if(cells.begin(), cells.end(), [&](const RanksCell& other) {
    return other.combine == combine && other.placement == placement &&
           other.backend == of.backend && other.activation_format == of.activation_format &&
           other.tokens == of.tokens && other.routing == of.routing;
  });
  return found == cells.end() ? nullptr : &*found;
}

// The time that the exchange adds to the ranks' own experts, median of the rounds.
std::optional<double> exchange_us(const RanksCell& of, const std::vector<RanksCell>& cells) {
  const RanksCell* const own =
      of.same_work ? beside(of, cells, kOwnExperts, of.placement) : nullptr;
  if (own == nullptr) return std::nullopt;
  std::vector<double> us;
  for (size_t round = 0; round < of.rounds.size(); ++round)
    us.push_back(median_us(of.rounds[round]) - median_us(own->rounds[round]));
  return median(std::move(us));
}

Cell name_cell(const std::string& name) { return name.empty() ? no_cell() : cell(name); }
Cell share_cell(double share) { return {fmt::format("{:.0f}", 100 * share), share}; }

std::vector<Cell> refused_row(const RanksCell& of) {
  std::vector<Cell> cells = {
      cell(of.backend), cell(of.activation_format), no_cell(),         no_cell(),
      no_cell(),        cell(of.combine),           name_cell(of.over)};
  cells.resize(21, no_cell());
  cells.push_back(cell("refused: " + of.refused, Style::kWarning));
  cells.back().value = of.refused;
  return cells;
}

std::vector<Cell> row(const RanksCell& of, const std::vector<RanksCell>& cells) {
  const bool ranks = of.combine != kOneRank, exchanges = ranks && of.combine != kOwnExperts;
  const std::vector<double> us =
      by_rank(of, [](const RanksRound& r, size_t rank) { return r.rank_median_us(rank); });
  const std::vector<double> sent =
      by_rank(of, [](const RanksRound& r, size_t rank) { return r.sent_bytes(rank); });
  const RanksCell* const one = beside(of, cells, kOneRank, "");
  const std::optional<double> added_us = exchange_us(of, cells);
  const double most_sent = *std::max_element(sent.begin(), sent.end());
  int64_t runs = 0;
  std::vector<double> medians;
  for (const RanksRound& round : of.rounds) {
    runs += static_cast<int64_t>(round.slowest_us.size());
    medians.push_back(median_us(round));
  }
  const auto [least, most] = std::minmax_element(medians.begin(), medians.end());
  std::vector<Cell> made = {
      cell(of.backend), cell(of.activation_format), cell(of.tokens), cell(of.routing),
      cell(of.busiest, "{:.2f}"), cell(of.combine), name_cell(of.over), name_cell(of.placement),
      cell(of_all(of), "{:.1f}"), cell(over_rounds(of, p90_us), "{:.1f}"),
      ranks && one != nullptr ? cell(of_all(of) / of_all(*one), "{:.2f}") : no_cell(),
      exchanges ? Cell{bytes_text(static_cast<uint64_t>(most_sent)), most_sent} : no_cell(),
      added_us ? cell(*added_us, "{:.1f}") : no_cell(),
      // No rate if the exchange's time is smaller than the noise.
      added_us && *added_us > 0 && most_sent > 0 ? cell(most_sent * 1e-3 / *added_us, "{:.2f}")
                                                 : no_cell()};
  Json parts = Json::object();
  for (size_t part = 0; part < kWireParts; ++part) {
    const auto which = static_cast<WirePart>(part);
    const double share = over_rounds(of, [&](const RanksRound& r) { return r.share(which); });
    const bool timed = exchanges && !of.on_device;
    made.push_back(timed ? share_cell(share) : no_cell());
    parts[kWirePartNames[part]] =
        by_rank(of, [&](const RanksRound& r, size_t rank) { return r.sent_bytes(rank, which); });
  }
  made.push_back(cell(runs));
  made.push_back({"", us});
  made.push_back({"", exchanges ? parts : Json(nullptr)});
  made.push_back({"", {*least, *most}});
  made.push_back({"", nullptr});
  return made;
}

}  // namespace

bool is_noisy(const RanksCell& of) {
  return std::any_of(of.rounds.begin(), of.rounds.end(), [](const RanksRound& round) {
    return p90_us(round) > 1.5 * round.slowest_us.front();
  });
}

Table ranks_table(const std::vector<RanksCell>& cells) {
  const auto any = [&](const auto& has) { return std::any_of(cells.begin(), cells.end(), has); };
  const bool refuses = any([](const RanksCell& c) { return !c.refused.empty(); });
  const bool balances = any([](const RanksCell& c) { return c.placement == "balanced"; });
  const bool devices = any([](const RanksCell& c) { return !c.over.empty(); });
  Table table({{"backend", "backend", false},
               {"activation_format", "activations", false},
               {"tokens", "tokens"},
               {"routing", "routing", false},
               {"busiest_over_even", "busiest"},
               {"combine", "over ranks", false},
               {"over", devices ? "over" : "", false},
               {"placement", balances ? "placement" : "", false},
               {"median_us", "median us"},
               {"p90_us", "p90 us"},
               {"times_one_rank", "times one"},
               {"sent_bytes", "sent by a rank"},
               {"exchange_us", "exchange us"},
               {"wire_gb_per_s", "GB/s"},
               {"agree_share", "% agree"},
               {"dispatch_share", "% dispatch"},
               {"combine_share", "% combine"},
               {"runs", "runs"},
               {"rank_median_us", ""},
               {"rank_sent_bytes", ""},
               {"range_us", ""},
               {"refused", refuses ? "note" : "", false}});
  for (const RanksCell& of : cells)
    table.add(of.refused.empty() ? row(of, cells) : refused_row(of));
  return table;
}

Json ranks_round_json(const RanksCell& of, size_t number) {
  const RanksRound& round = of.rounds[number];
  Json us = Json::array();
  for (size_t rank = 0; rank < round.ranks.size(); ++rank) us.push_back(round.rank_median_us(rank));
  return {{"backend", of.backend},
          {"activation_format", of.activation_format},
          {"tokens", of.tokens},
          {"routing", of.routing},
          {"combine", of.combine},
          {"over", of.over.empty() ? Json() : Json(of.over)},
          {"placement", of.placement.empty() ? Json() : Json(of.placement)},
          {"round", number},
          {"median_us", median_us(round)},
          {"runs", round.slowest_us.size()},
          {"rank_median_us", us}};
}

}  // namespace nvfp4_moe::internal::cli
