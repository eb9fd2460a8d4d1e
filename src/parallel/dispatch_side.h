// What both ways of all_to_all on a device share: a rank as home of its tokens, or as owner of its experts.
#pragma once

#include <memory>

#include "backend/device_exchange.h"
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
  StepContext step(const PackedWeights& weights, void* stream, const AwaitedRows* awaited = nullptr) const {
    return {weights, batch, buffers, serial_executor(), arena, stream, plan, awaited};
  }
};

// What both ways keep in a run's workspace. T tokens of this rank, U of all ranks for this one at most.
struct DispatchSpans {
  RunStatus* status = nullptr;  // the home's
  uint32_t* failed = nullptr;   // (1) why out is NaN; 0: it is not
  int32_t* slots = nullptr;     // (T, k)
  int32_t* ids = nullptr;       // (U, k) slots of this rank
  float* weights = nullptr;     // (U, k)
  std::byte* home = nullptr;    // a workspace of T tokens
  std::byte* owner = nullptr;   // a workspace of U tokens

  void take(const MoeLayer& layer, int64_t tokens, int64_t received, Arena& arena);
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

// Both sides of a layer's runs.
class DispatchSides {
 public:
  explicit DispatchSides(const MoeLayer& layer) : layer_(layer) {}
  // rows_out: where the rows that come back lie; null: where home's own would.
  DispatchSide home(const DispatchSpans& spans, const Batch& batch, void* rows_out);
  DispatchSide owner(const DispatchSpans& spans, int64_t records);

 private:
  const MoeLayer& layer_;
  LastPlan home_plan_, owner_plan_;
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
