// A batch of arrays in host memory, run in the layer's memory: for a device layer they are copied
// there, and the output back. For tools and checks; unlike a run it allocates, copies and waits.
#pragma once

#include <vector>

#include "moe/layer.h"

namespace nvfp4_moe::internal {

class PlacedBatch {
 public:
  // `host` must outlive it: batch() borrows its arrays if the layer is in host memory. It must have
  // chosen experts, not a selection.
  static Result<PlacedBatch> place(const MoeLayer& layer, const Batch& host);
  // Arrays in the layer's memory.
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
  double seconds = 0;         // of the first run only, in a workspace whose pages are touched
  std::vector<double> again;  // seconds of each further run, ascending
  double median_again() const { return again[again.size() / 2]; }
};
// Places the batch, runs it in a new workspace, and fetches the output. Repeats while all runs
// together took less than `repeat_seconds`, at most kMostRepeats times. Every run gives the same
// output.
inline constexpr int kMostRepeats = 64;
Result<TimedRun> run_from_host(const MoeLayer& layer, const Batch& host, double repeat_seconds = 0);

}  // namespace nvfp4_moe::internal
