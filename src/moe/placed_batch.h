// A batch of arrays in host memory, run where the layer lies: on a device they are copied there,
// and the output back. For tools and checks; it allocates, copies and waits, which a run does not.
#pragma once

#include <vector>

#include "moe/layer.h"

namespace nvfp4_moe::internal {

class PlacedBatch {
 public:
  // `host` outlives it; its arrays are what batch() borrows if the layer lies in host memory. It
  // has no selection: its experts are chosen.
  static Result<PlacedBatch> place(const MoeLayer& layer, const Batch& host);
  // In the layer's memory.
  const Batch& batch() const { return placed_; }
  // Copies batch().out to the host's out, after the runs in `stream`.
  Status fetch(void* stream = nullptr) const;

 private:
  const MoeLayer* layer_ = nullptr;
  Batch host_, placed_;
  std::vector<Buffer> copies_;
};

struct TimedRun {
  RunStatus status;           // of the first run
  double seconds = 0;         // of the first run alone, in a workspace whose pages are there
  std::vector<double> again;  // seconds of each further run, ascending
  double median_again() const { return again[again.size() / 2]; }
};
// Places, runs in a workspace of its own, and fetches. Runs again while all runs together have
// taken less than `repeat_seconds`, at most kMostRepeats times; every run leaves the same output.
inline constexpr int kMostRepeats = 64;
Result<TimedRun> run_from_host(const MoeLayer& layer, const Batch& host, double repeat_seconds = 0);

}  // namespace nvfp4_moe::internal
