// What both ways of all_to_all on a device share: a rank as home of its tokens, or as owner of its experts.
#pragma once

#include <memory>

#include "backend/layer_steps.h"
#include "core/arena.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe {

// Home or owner in one run: its batch, its arrays, and how its steps run.
struct DispatchSide {
  Batch batch;
  Arena arena;
  LayerBuffers buffers;
  const RunPlan* plan;

  // buffers are taken from a workspace of the layer's size for so many tokens.
  DispatchSide(const MoeLayer& layer, const Batch& of, std::byte* workspace)
      : batch(of), arena(workspace, layer.plan().limits.guard_bytes), plan(nullptr) {
    buffers = layer_buffers(layer.config(), layer.weights().range, batch.tokens, arena);
  }
  StepContext step(const PackedWeights& weights, void* stream) const {
    return {weights, batch, buffers, serial_executor(), arena, stream, plan};
  }
};

// The plan of single steps for a batch like the last one is the last one.
class LastPlan {
 public:
  const RunPlan* of(const MoeLayer& layer, const Batch& batch) {
    const bool aligned = reinterpret_cast<uintptr_t>(batch.hidden) % 16 == 0;
    if (tokens_ != batch.tokens || hidden_dtype_ != batch.hidden_dtype || hidden_aligned_ != aligned) {
      tokens_ = batch.tokens, hidden_dtype_ = batch.hidden_dtype, hidden_aligned_ = aligned;
      plan_ = layer.backend().steps->plan(layer.weights(), layer.plan(), batch);
    }
    return plan_.get();
  }

 private:
  int64_t tokens_ = -1;
  DType hidden_dtype_{};
  bool hidden_aligned_ = false;
  std::shared_ptr<const RunPlan> plan_;
};

// Calls body() with the layer's device as the thread's current one, which steps launch on.
template <class Body>
Status on_device_of(const MoeLayer& layer, Body body) {
  const auto call = [](void* argument) -> Status { return (*static_cast<Body*>(argument))(); };
  return device_ranks(layer.plan().device.kind)->on_device(layer.weights().device, call, &body);
}

// What runs of all_to_all on a device have found wrong, kept there.
class DeviceReport {
 public:
  static Result<DeviceReport> make(const MoeLayer& layer);
  WireReport* on_device() const { return reinterpret_cast<WireReport*>(report_.data()); }
  // Since the last call. Waits for the stream.
  Result<WireReport> take(const MoeLayer& layer, void* stream) const;
  // Of records that are none of the rank's.
  static Status wrong_records(int rank, uint64_t count);

 private:
  Buffer report_;
};

}  // namespace nvfp4_moe
