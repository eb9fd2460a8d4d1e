// BenchCell: what `bench` measured of one configuration at one token count, and the tables that tell it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/cpu_peaks.h"
#include "cli/table.h"
#include "cli/timed_layer.h"

namespace nvfp4_moe::cli {

// What one call of a layer does, on average over its batches.
struct BenchWork {
  double rows = 0;
  double bytes = 0;  // of the packed weights that it touches
  double flop = 0;   // 2 for each multiply-add of the GEMMs
};
BenchWork work_of(const MoeLayer& layer, int64_t tokens, double experts_touched);

struct BenchRound {
  RunTimes times;
  std::array<double, kSteps> step_us{};  // zeros unless asked for
  BenchWork work;
  double read_gb_per_s = 0;     // of this host, beside the runs
  double peak_gflop_per_s = 0;  // likewise; 0 where the kernel has no known peak
  double seconds() const { return times.at(0.5) * 1e-6; }
  double touched_gb_per_s() const { return work.bytes * 1e-9 / seconds(); }
  double gflop_per_s() const { return work.flop * 1e-9 / seconds(); }
  double read_share() const { return touched_gb_per_s() / read_gb_per_s; }
  double peak_share() const { return peak_gflop_per_s > 0 ? gflop_per_s() / peak_gflop_per_s : 0; }
};

struct BenchCell {
  std::string backend;
  std::string activation_format;
  int64_t tokens = 0;
  const ComputePeak* peak = nullptr;
  std::vector<BenchRound> rounds;
};

// A row a cell: medians of the rounds, and their range.
Table timings_table(const std::vector<BenchCell>& cells);
// A row a cell and step.
Table steps_table(const std::vector<BenchCell>& cells);
// One round of a cell, for JSON.
Json round_json(const BenchCell& cell, size_t round);

}  // namespace nvfp4_moe::cli
