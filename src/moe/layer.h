// MoeLayer: {backend, packed weights, plan} with run. Complete or never returned.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "checkpoint/checkpoint.h"
#include "core/progress.h"

namespace nvfp4_moe {

// Where a layer's experts come from: a checkpoint, or arrays of the caller. Called once per local expert, in order;
// what it returns is dropped before the next call (F9).
struct LayerSource {
  std::function<Result<LoadedExpert>(int64_t global_expert)> expert;
  std::function<Result<LoadedExpert>()> shared_expert;  // may be empty
  std::function<void(int64_t global_expert)> release;   // may be empty
  LayerScales scales;
};

struct LayerOptions {
  std::string backend = "auto";  // or a name of the registry; NVFP4_MOE_BACKEND overrides "auto"
  ExpertRange range;             // count 0: all experts
  Limits limits;
  Executor* executor = nullptr;  // null: the layer owns a pool with one thread per core
  size_t guard_bytes = 0;        // tests: bytes between workspace spans
};

// One line of `explain`: a backend and why it was or was not chosen.
struct Choice {
  std::string backend;
  bool chosen = false;
  std::string reason;
};
// Pure: which backend takes this config on this device, and why the others do not.
std::vector<Choice> explain(const MoeConfig& config, const DeviceFacts& device, const std::string& forced = "auto");

class MoeLayer {
 public:
  // Packs streaming: peak memory = packed + one expert. progress may be empty.
  static Result<std::unique_ptr<MoeLayer>> open(const MoeConfig& config, const LayerSource& source,
                                                const LayerOptions& options, const ProgressFn& progress = {});

  const Backend& backend() const { return *backend_; }
  const MoeConfig& config() const { return weights_->config; }
  const PackedWeights& weights() const { return *weights_; }
  const Plan& plan() const { return plan_; }
  size_t workspace_bytes() const { return plan_.workspace.total_bytes(); }
  std::string describe_json() const;  // backend, kernel per step, scale policy

  // Checks the batch (shape, dtype, pointers, token count), then runs. const: several streams may run one layer at
  // once, each with a workspace of its own.
  Status run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream = nullptr) const;
  // What the last run in this workspace noticed.
  Result<RunStatus> status(const void* workspace, size_t workspace_bytes) const;

  // Replaces one expert's weights in place (F43): no allocation; kBusy while a run is in flight.
  Status replace_expert(int64_t local_expert, const ExpertSource& source);
  Status unpack_expert(int64_t local_expert, ExpertBuffers& out) const;

 private:
  MoeLayer() = default;
  friend class PackedCache;
  const Backend* backend_ = nullptr;
  std::unique_ptr<PackedWeights> weights_;
  Plan plan_;
  std::unique_ptr<Executor> owned_executor_;
  Executor* executor_ = nullptr;
  mutable std::atomic<int64_t> runs_in_flight_{0};  // -1 while weights are being replaced
};

// A LayerSource over a checkpoint's layer. The checkpoint must outlive the source.
Result<LayerSource> layer_source(const Checkpoint& checkpoint, int64_t layer, const IntermediateSlice& slice = {});
DeviceFacts host_facts();

}  // namespace nvfp4_moe
