// Configuration: one of the layers that `bench` compares: a backend and an activation format for
// one subject.
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
  std::string backend;  // as requested
  Subject subject;
  std::optional<TimedLayer> timed;
  const ComputePeak* peak = nullptr;  // of its GEMM; null on a device or if none is known
  std::string peak_name;              // empty if none is known
  double read_gb_per_s = 0;           // on a device
  double peak_gflop_per_s = 0;        // on a device

  const char* format() const { return to_string(subject.options.activation_format); }
};

// Compares the backend with the reference on a few tokens of the layer's first experts. Returns
// what is wrong; empty if they agree.
Result<std::string> disagreement(const Configuration& configuration, const std::string& device,
                                 uint64_t seed, Executor& executor);

// The number of copies of each layer that exceed the last-level cache twice, limited to half of the
// free memory. kOutOfMemory if not even one copy fits. layers_each: the most whole layers that a
// configuration alternates between.
Result<int64_t> copies_of(const std::vector<Configuration>& all, const DeviceFacts& device,
                          const std::string& device_name, double layers_each = 1);

// The peak that bounds a host layer's GEMMs; null if none is known.
const ComputePeak* peak_of_layer(const MoeLayer& layer);

// Times one round of an open layer that is prepared for `tokens`: its runs, and with `steps` each
// step separately.
Result<BenchRound> time_round(Configuration& one, int64_t tokens, const Repeat& repeat, bool steps,
                              Executor& executor);

}  // namespace nvfp4_moe::internal::cli
