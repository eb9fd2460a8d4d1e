// BenchCell: what `bench` measured of one configuration at one token count, and the tables that
// tell it.
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
  double bytes = 0;     // of the packed weights that it touches
  double flop = 0;      // 2 for each multiply-add of the GEMMs
  double matrices = 3;  // of an expert: one is gemm2's
};
BenchWork work_of(const MoeLayer& layer, int64_t tokens, double experts_touched);

struct BenchRound {
  RunTimes times;
  std::array<double, kSteps> step_us{};  // zeros unless asked for
  BenchWork work;
  double read_gb_per_s = 0;     // of this host, beside the runs
  double peak_gflop_per_s = 0;  // likewise; 0 if the kernel has no known peak
  double seconds() const { return times.at(0.5) * 1e-6; }
  // The least that these bytes and operations take at those rates.
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
  std::string peak;  // its name; empty if none is known
  std::vector<BenchRound> rounds;
};

// A row a cell: medians of the rounds, and their range. A device's rates are steady enough to tell
// a floor by.
Table timings_table(const std::vector<BenchCell>& cells, bool on_device);
// A row a cell and step.
Table steps_table(const std::vector<BenchCell>& cells);
// One round of a cell, for JSON.
Json round_json(const BenchCell& cell, size_t round);

}  // namespace nvfp4_moe::internal::cli
