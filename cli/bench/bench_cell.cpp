#include "cli/bench/bench_cell.h"

#include <fmt/format.h>

#include <algorithm>

namespace nvfp4_moe::internal::cli {
namespace {

// Statistics of a figure over the rounds.
struct Figure {
  double median, least, most;
  Json range() const { return {least, most}; }
};
template <class Value>
Figure over(const BenchCell& cell, const Value& value) {
  std::vector<double> values;
  for (const BenchRound& round : cell.rounds) values.push_back(value(round));
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return {median(values), *least, *most};
}

// "85", or "85 (83-88)" over several rounds.
Cell share_cell(const Figure& figure, size_t rounds) {
  std::string text = fmt::format("{:.0f}", 100 * figure.median);
  if (rounds > 1) text += fmt::format(" ({:.0f}-{:.0f})", 100 * figure.least, 100 * figure.most);
  return {text, figure.median};
}
Cell nothing(const char* text) { return {text, nullptr}; }

std::vector<Cell> timings_row(const BenchCell& of) {
  using R = BenchRound;
  const Figure us = over(of, [](const R& r) { return r.times.at(0.5); });
  const Figure touched = over(of, [](const R& r) { return r.touched_gb_per_s(); });
  const Figure gflops = over(of, [](const R& r) { return r.gflop_per_s(); });
  const Figure read_share = over(of, [](const R& r) { return r.read_share(); });
  const Figure peak_share = over(of, [](const R& r) { return r.peak_share(); });
  const Figure peak = over(of, [](const R& r) { return r.peak_gflop_per_s; });
  const Figure floor = over(of, [](const R& r) { return r.floor_us(); });
  const Figure floors = over(of, [](const R& r) { return r.times.at(0.5) / r.floor_us(); });
  const bool known = !of.peak.empty(), computes = peak_share.median > read_share.median;
  int64_t runs = 0;
  for (const R& round : of.rounds) runs += static_cast<int64_t>(round.times.us.size());
  Json range = {{"median_us", us.range()},
                {"touched_gb_per_s", touched.range()},
                {"read_share", read_share.range()},
                {"gflop_per_s", gflops.range()},
                {"times_floor", floors.range()}};
  if (known) range["peak_share"] = peak_share.range();
  return {cell(of.backend),
          cell(of.activation_format),
          cell(of.tokens),
          cell(static_cast<int64_t>(of.rounds.front().work.rows)),
          cell(over(of, [](const R& r) { return r.times.experts; }).median, "{:.1f}"),
          cell(us.median, "{:.1f}"),
          cell(over(of, [](const R& r) { return r.times.us.front(); }).least, "{:.1f}"),
          cell(over(of, [](const R& r) { return r.times.at(0.9); }).median, "{:.1f}"),
          cell(touched.median, "{:.2f}"),
          cell(over(of, [](const R& r) { return r.read_gb_per_s; }).median, "{:.1f}"),
          share_cell(read_share, of.rounds.size()),
          cell(gflops.median, "{:.1f}"),
          known ? cell(peak.median, "{:.0f}") : nothing("-"),
          known ? share_cell(peak_share, of.rounds.size()) : nothing("-"),
          cell(floor.median, "{:.1f}"),
          cell(floors.median, "{:.2f}"),
          cell(computes ? of.peak : "read"),
          cell(std::max(read_share.median, peak_share.median), "{:.3f}"),
          cell(runs),
          {"", range}};
}

// The share of a layer's weights and products in a step.
double gemm_part(size_t step, double matrices) {
  return step == kGemm1 ? 1 - 1 / matrices : step == kGemm2 ? 1 / matrices : 0;
}

}  // namespace

BenchWork work_of(const MoeLayer& layer, int64_t tokens, double experts_touched) {
  const MoeConfig& config = layer.config();
  // A shared expert is touched by every call and has a row per token.
  const auto intermediate = static_cast<double>(config->intermediate_size);
  const auto shared = static_cast<double>(config->shared_intermediate_size);
  const double channels = static_cast<double>(layer.weights().range.count) * intermediate + shared;
  const double channel_bytes = static_cast<double>(layer.weights().bytes.size_bytes()) / channels;
  BenchWork work;
  work.matrices = static_cast<double>(matrices_of_expert(config->activation));
  const double channel_flop = 2 * work.matrices * static_cast<double>(config->hidden_size);
  work.rows = static_cast<double>(tokens * config->top_k);
  work.bytes = (experts_touched * intermediate + shared) * channel_bytes;
  work.flop = (work.rows * intermediate + static_cast<double>(tokens) * shared) * channel_flop;
  return work;
}

Table timings_table(const std::vector<BenchCell>& cells, bool on_device) {
  Table table({{"backend", "backend", false},
               {"activation_format", "activations", false},
               {"tokens", "tokens"},
               {"rows", "rows"},
               {"experts_touched", "experts"},
               {"median_us", "median us"},
               {"min_us", ""},
               {"p90_us", "p90 us"},
               {"touched_gb_per_s", "GB/s"},
               {"read_gb_per_s", on_device ? "GPU reads" : "host reads"},
               {"read_share", "% of it"},
               {"gflop_per_s", "GFLOP/s"},
               {"peak_gflop_per_s", "peak"},
               {"peak_share", "% of it"},
               {"floor_us", on_device ? "floor us" : ""},
               {"times_floor", on_device ? "floors" : ""},
               {"limit", "nearest limit", false},
               {"limit_share", ""},
               {"runs", "runs"},
               {"range", ""}});
  for (const BenchCell& of : cells) table.add(timings_row(of));
  return table;
}

Table steps_table(const std::vector<BenchCell>& cells) {
  Table table({{"backend", "backend", false},
               {"activation_format", "activations", false},
               {"tokens", "tokens"},
               {"step", "step", false},
               {"median_us", "median us"},
               {"share", "% of the steps"},
               {"gb_per_s", "GB/s"},
               {"gflop_per_s", "GFLOP/s"}});
  for (const BenchCell& of : cells) {
    std::array<double, kSteps> us{};
    double sum_us = 0;
    for (size_t step = 0; step < kSteps; ++step) {
      us[step] = over(of, [&](const BenchRound& r) { return r.step_us[step]; }).median;
      sum_us += us[step];
    }
    const double bytes = over(of, [](const BenchRound& r) { return r.work.bytes; }).median;
    const double flop = over(of, [](const BenchRound& r) { return r.work.flop; }).median;
    const double matrices = of.rounds.front().work.matrices;
    for (size_t step = 0; step < kSteps; ++step) {
      // per ns, that is 1e9 per second
      const double part = gemm_part(step, matrices) / (us[step] * 1e3);
      table.add({cell(of.backend),
                 cell(of.activation_format),
                 cell(of.tokens),
                 cell(kStepNames[step]),
                 cell(us[step], "{:.1f}"),
                 {fmt::format("{:.1f}", 100 * us[step] / sum_us), us[step] / sum_us},
                 part > 0 ? cell(bytes * part, "{:.2f}") : nothing(""),
                 part > 0 ? cell(flop * part, "{:.1f}") : nothing("")});
    }
  }
  return table;
}

Json round_json(const BenchCell& of, size_t number) {
  const BenchRound& round = of.rounds[number];
  return {{"backend", of.backend},
          {"activation_format", of.activation_format},
          {"tokens", of.tokens},
          {"round", number},
          {"median_us", round.times.at(0.5)},
          {"min_us", round.times.us.front()},
          {"p90_us", round.times.at(0.9)},
          {"runs", round.times.us.size()},
          {"read_gb_per_s", round.read_gb_per_s},
          {"peak_gflop_per_s", of.peak.empty() ? Json() : Json(round.peak_gflop_per_s)}};
}

}  // namespace nvfp4_moe::internal::cli
