// Replaces an expert of a layer on a device, in stream order. The new expert is packed into
// separate memory; one kernel then copies all of it into the layer. Runs and graph replays in that
// stream use either the old expert or the new one, never a mix.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace nvfp4_moe::internal {

// An expert that is packed on its own.
struct StagedExpert {
  PackedWeights weights;  // holds only this expert
  std::shared_ptr<void*>
      release_in;  // stream in which the memory is freed, while other streams may still run
};

// Event after the last replacement in a layer; null if there was none. Its destructor waits for the
// event.
using ReplacementEvent = std::shared_ptr<void>;

// No call disturbs captures of other threads.
struct DeviceReplacement {
  // pack: the backend's pack_expert. When stage returns, the expert is packed and the source may be
  // freed.
  Result<StagedExpert> (*stage)(const PackedWeights& weights, int64_t local_expert,
                                const ExpertSource& source,
                                Status (*pack)(PackedWeights&, int64_t, const ExpertSource&));
  // Enqueues the replacement in `stream`, ordered after the one of `last`, and updates `last`. The
  // host's fields of the expert (scales and the like) change immediately. Precondition: no run is
  // being enqueued, and the stream is not capturing.
  Status (*put)(PackedWeights& weights, int64_t local_expert, StagedExpert& staged,
                ReplacementEvent& last, void* stream);
  // Waits until the replacement is done.
  Status (*wait)(const ReplacementEvent& last);
};

extern const DeviceReplacement
    kCudaReplacement;  // in builds with NVFP4_MOE_WITH_CUDA; all CUDA backends share it

}  // namespace nvfp4_moe::internal
