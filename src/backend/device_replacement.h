// An expert of a layer on a device, replaced in the order of a stream: it is packed into memory of
// its own, from which one kernel puts all of it into the layer. Runs and replays in that stream
// have the old expert or the new one.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace nvfp4_moe::internal {

// An expert that is packed by itself.
struct StagedExpert {
  PackedWeights weights;  // it is the only expert
  std::shared_ptr<void*>
      release_in;  // the stream in which the memory is given back, while others may still run
};

// Event after the last replacement in a layer; null if there was none. Its destructor waits for it.
using ReplacementEvent = std::shared_ptr<void>;

// No call disturbs captures of other threads.
struct DeviceReplacement {
  // pack: the backend's pack_expert. Returns once the expert is packed, and the source may go.
  Result<StagedExpert> (*stage)(const PackedWeights& weights, int64_t local_expert,
                                const ExpertSource& source,
                                Status (*pack)(PackedWeights&, int64_t, const ExpertSource&));
  // Enqueues in `stream`, after the replacement of `last`, which then is this one. What the host
  // keeps of the expert changes at once. Precondition: no run is being enqueued, and the stream is
  // not captured.
  Status (*put)(PackedWeights& weights, int64_t local_expert, StagedExpert& staged,
                ReplacementEvent& last, void* stream);
  // Until the replacement is done.
  Status (*wait)(const ReplacementEvent& last);
};

extern const DeviceReplacement
    kCudaReplacement;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe::internal
