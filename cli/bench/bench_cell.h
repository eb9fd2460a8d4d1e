// BenchCell: the results of `bench` for one configuration and token count, and their tables.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/bench/timed_layer.h"
#include "cli/console/table.h"

namespace nvfp4_moe::internal::cli {

// The work of one call of a layer, averaged over its batches.
struct BenchWork {
  double rows = 0;
  double bytes = 0;     // of packed weights that it touches
  double flop = 0;      // of the GEMMs; a multiply-add counts 2
  double matrices = 3;  // per expert; one of them is gemm2's
};
BenchWork work_of(const MoeLayer& layer, int64_t tokens, double experts_touched);

struct BenchRound {
  RunTimes times;
  std::array<double, kSteps> step_us{};  // zeros without --steps
  BenchWork work;
  double read_gb_per_s = 0;     // of this host, measured around the runs
  double peak_gflop_per_s = 0;  // likewise; 0 if the kernel has no known peak
  double seconds() const { return times.at(0.5) * 1e-6; }
  // The least time for these bytes and operations at those rates.
  double floor_us() const {
    const double read_us = work.bytes * 1e-3 / read_gb_per_s;
    return peak_gflop_per_s > 0 ? std::max(read_us, work.flop * 1e-3 / peak_gflop_per_s) : read_us;
  }
  double touched_gb_per_s() const { return work.bytes * 1e-9 / seconds(); }
  double gflop_per_s() const { return work.flop * 1e-9 / seconds(); }
  double read_share() const { return touched_gb_per_s() / read_gb_per_s; }
  double peak_share() const { return peak_gflop_per_s > 0 ? gflop_per_s() / peak_gflop_per_s : 0; }
};

struct BenchCell {
  std::string backend;
  std::string activation_format;
  int64_t tokens = 0;
  std::string peak;  // the peak's name; empty if none is known
  std::vector<BenchRound> rounds;
};

// One row per cell: medians of the rounds, and their range. The floor is shown only for a device,
// whose rates are steady enough.
Table timings_table(const std::vector<BenchCell>& cells, bool on_device);
// One row per cell and step.
Table steps_table(const std::vector<BenchCell>& cells);
// One round of a cell, for JSON.
Json round_json(const BenchCell& cell, size_t round);

}  // namespace nvfp4_moe::internal::cli
