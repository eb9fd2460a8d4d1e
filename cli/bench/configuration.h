// Configuration: one of the layers that `bench` compares, a backend and an activation format of one
// subject.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/bench/bench_cell.h"
#include "cli/bench/cpu_peaks.h"
#include "cli/bench/subject.h"
#include "cli/bench/timed_layer.h"

namespace nvfp4_moe::internal::cli {

struct Configuration {
  std::string backend;  // as asked for
  Subject subject;
  std::optional<TimedLayer> timed;
  const ComputePeak* peak = nullptr;  // of its GEMM; null if none is known, and on a device
  std::string peak_name;              // empty if none is known
  double read_gb_per_s = 0;           // on a device
  double peak_gflop_per_s = 0;        // on a device

  const char* format() const { return to_string(subject.options.activation_format); }
};

// Empty if the backend agrees with the reference on a few tokens of the layer's first experts; else
// what is wrong.
Result<std::string> disagreement(const Configuration& configuration, const std::string& device,
                                 uint64_t seed, Executor& executor);

// How many copies of each layer keep twice the last level of cache busy, as far as half of the free
// memory goes. kOutOfMemory if the layers do not fit once. layers_each: how many whole ones a
// configuration has that take turns, where there is most of them.
Result<int64_t> copies_of(const std::vector<Configuration>& all, const DeviceFacts& device,
                          const std::string& device_name, double layers_each = 1);

// The peak that bounds a host layer's GEMMs; null if none is known.
const ComputePeak* peak_of_layer(const MoeLayer& layer);

// One round of a layer that is open and prepared for `tokens`: its runs, and each step by itself if
// asked for.
Result<BenchRound> time_round(Configuration& one, int64_t tokens, const Repeat& repeat, bool steps,
                              Executor& executor);

}  // namespace nvfp4_moe::internal::cli
