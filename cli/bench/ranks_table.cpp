#include "cli/bench/ranks_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cli/console/lists.h"

namespace nvfp4_moe::internal::cli {
namespace {

double p90_us(const RanksRound& round) {
  return round.us[static_cast<size_t>(0.9 * static_cast<double>(round.us.size() - 1) + 0.5)];
}

template <class Value>
std::vector<double> by_round(const RanksCell& of, const Value& value) {
  std::vector<double> values;
  for (const RanksRound& round : of.rounds) values.push_back(value(round));
  return values;
}
std::vector<double> medians_us(const RanksCell& of) {
  return by_round(of, [](const RanksRound& round) { return median(round.us); });
}

// For each rank, the median over the rounds of value(round, rank).
template <class Value>
std::vector<double> by_rank(const RanksCell& of, size_t ranks, const Value& value) {
  std::vector<double> values;
  for (size_t rank = 0; rank < ranks; ++rank)
    values.push_back(median(by_round(of, [&](const RanksRound& r) { return value(r, rank); })));
  return values;
}

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

Cell name_cell(const std::string& name) { return name.empty() ? no_cell() : cell(name); }

std::vector<Cell> row(const RanksCell& of, const std::vector<RanksCell>& cells) {
  const std::vector<double> us = medians_us(of);
  const double median_us = median(us);
  const size_t ranks = of.rounds.front().rank_us.size();
  const RanksCell* const one = beside(of, cells, kOneRank, "");
  int64_t runs = 0;
  for (const RanksRound& round : of.rounds) runs += std::ssize(round.us);
  std::vector<Cell> made = {cell(of.backend),
                            cell(of.activation_format),
                            cell(of.tokens),
                            cell(of.routing),
                            cell(of.busiest, "{:.2f}"),
                            cell(of.combine),
                            name_cell(of.over),
                            name_cell(of.placement),
                            cell(median_us, "{:.1f}"),
                            cell(median(by_round(of, p90_us)), "{:.1f}"),
                            one == nullptr || one == &of
                                ? no_cell()
                                : cell(median_us / median(medians_us(*one)), "{:.2f}")};
  const auto rank_us =
      by_rank(of, ranks, [](const RanksRound& r, size_t rank) { return r.rank_us[rank]; });
  Json parts;
  if (of.combine == kOneRank || of.combine == kOwnExperts) {
    made.insert(made.end(), 3 + kWireParts, no_cell());
  } else {
    const auto sent = by_rank(of, ranks, [](const RanksRound& r, size_t rank) {
      return std::reduce(r.sent_bytes[rank].begin(), r.sent_bytes[rank].end());
    });
    const double most_sent = *std::max_element(sent.begin(), sent.end());
    made.push_back({bytes_text(static_cast<uint64_t>(most_sent)), most_sent});
    // The time that the exchange adds to the ranks' own experts, median of the rounds.
    if (const RanksCell* const own =
            of.same_work ? beside(of, cells, kOwnExperts, of.placement) : nullptr) {
      std::vector<double> added = us;
      const std::vector<double> own_us = medians_us(*own);
      for (size_t round = 0; round < us.size(); ++round) added[round] -= own_us[round];
      const double added_us = median(std::move(added));
      made.push_back(cell(added_us, "{:.1f}"));
      // No rate if the exchange's time is smaller than the noise.
      made.push_back(added_us > 0 && most_sent > 0 ? cell(most_sent * 1e-3 / added_us, "{:.2f}")
                                                   : no_cell());
    } else {
      made.insert(made.end(), 2, no_cell());
    }
    for (size_t part = 0; part < kWireParts; ++part) {
      const double share =
          median(by_round(of, [&](const RanksRound& round) { return round.shares[part]; }));
      made.push_back(of.on_device ? no_cell() : Cell{fmt::format("{:.0f}", 100 * share), share});
      parts[kWirePartNames[part]] = by_rank(
          of, ranks, [&](const RanksRound& r, size_t rank) { return r.sent_bytes[rank][part]; });
    }
  }
  made.push_back(cell(runs));
  made.push_back({"", rank_us});
  made.push_back({"", parts});
  made.push_back({"", us});
  return made;
}

}  // namespace

bool is_noisy(const RanksCell& of) {
  return std::any_of(of.rounds.begin(), of.rounds.end(), [](const RanksRound& round) {
    return p90_us(round) > 1.5 * round.us.front();
  });
}

Table ranks_table(const std::vector<RanksCell>& cells) {
  const bool balances = std::any_of(cells.begin(), cells.end(), [](const RanksCell& cell) {
    return cell.placement == "balanced";
  });
  Table table({{"backend", "backend", false},
               {"activation_format", "activations", false},
               {"tokens", "tokens"},
               {"routing", "routing", false},
               {"busiest_over_even", "busiest"},
               {"combine", "over ranks", false},
               {"over", "", false},
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
               {"round_median_us", ""}});
  for (const RanksCell& of : cells) table.add(row(of, cells));
  return table;
}

}  // namespace nvfp4_moe::internal::cli
