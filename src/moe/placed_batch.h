// A batch of arrays in host memory, run where the layer lies: on a device they are copied there, and the output back.
// For tools and checks; it allocates, copies and waits, which a run does not.
#pragma once

#include <vector>

#include "moe/layer.h"

namespace nvfp4_moe {

class PlacedBatch {
 public:
  // `host` outlives it; its arrays are what batch() borrows where the layer lies in host memory.
  static Result<PlacedBatch> place(const MoeLayer& layer, const Batch& host);
  // In the layer's memory.
  const Batch& batch() const { return placed_; }
  // What the runs in `stream` left in batch().out, in the host's out.
  Status fetch(void* stream = nullptr) const;

 private:
  const MoeLayer* layer_ = nullptr;
  Batch host_, placed_;
  std::vector<Buffer> copies_;
};

struct TimedRun {
  RunStatus status;
  double seconds = 0;  // of the run alone
};
// Places, runs once in a workspace of its own, and fetches.
Result<TimedRun> run_from_host(const MoeLayer& layer, const Batch& host);

}  // namespace nvfp4_moe
