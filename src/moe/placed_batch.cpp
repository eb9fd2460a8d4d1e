#include "moe/placed_batch.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace nvfp4_moe::internal {

Result<PlacedBatch> PlacedBatch::place(const MoeLayer& layer, const Batch& host) {
  if (host.selection != nullptr)
    return unsupported("a batch from host memory: expected chosen experts, got a selection");
  PlacedBatch made;
  made.layer_ = &layer;
  made.host_ = made.placed_ = host;
  const DeviceMemory* const memory = layer.backend().memory;
  if (memory == nullptr) return made;
  const int device = layer.weights().device;
  const auto copy = [&](const void* from, int64_t count, DType dtype) -> Result<void*> {
    const auto size_bytes = static_cast<size_t>(count * (bits(dtype) / 8));
    NVFP4_MOE_ASSIGN(Buffer bytes,
                     layer.backend().allocate(std::max<size_t>(size_bytes, 1), device, "a batch"));
    if (from != nullptr)
      NVFP4_MOE_TRY(memory->to_device(device, bytes.data(), from, size_bytes, nullptr));
    made.copies_.push_back(std::move(bytes));
    return static_cast<void*>(made.copies_.back().data());
  };
  const int64_t elements = host.tokens * layer.config()->hidden_size,
                assignments = host.tokens * layer.config()->top_k;
  NVFP4_MOE_ASSIGN(made.placed_.hidden, copy(host.hidden, elements, host.hidden_dtype));
  NVFP4_MOE_ASSIGN(made.placed_.topk_ids, copy(host.topk_ids, assignments, host.ids_dtype));
  NVFP4_MOE_ASSIGN(void* const weights, copy(host.topk_weights, assignments, DType::kF32));
  made.placed_.topk_weights = static_cast<const float*>(weights);
  if (host.shared_weights != nullptr) {
    NVFP4_MOE_ASSIGN(void* const shared, copy(host.shared_weights, host.tokens, DType::kF32));
    made.placed_.shared_weights = static_cast<const float*>(shared);
  }
  NVFP4_MOE_ASSIGN(made.placed_.out, copy(nullptr, elements, host.out_dtype));
  return made;
}

Status PlacedBatch::fetch(void* stream) const {
  const DeviceMemory* const memory = layer_->backend().memory;
  if (memory == nullptr) return {};
  const auto size_bytes = static_cast<size_t>(host_.tokens * layer_->config()->hidden_size *
                                              (bits(host_.out_dtype) / 8));
  return memory->to_host(layer_->weights().device, host_.out, placed_.out, size_bytes, stream);
}

Result<TimedRun> run_from_host(const MoeLayer& layer, const Batch& host, double repeat_seconds) {
  NVFP4_MOE_ASSIGN(const PlacedBatch placed, PlacedBatch::place(layer, host));
  NVFP4_MOE_ASSIGN(const Buffer workspace,
                   layer.backend().allocate(std::max<size_t>(layer.workspace_bytes(), 1),
                                            layer.weights().device, "workspace"));
  // Touch a host's pages first: their cost belongs to the workspace, not to the run.
  if (layer.backend().memory == nullptr) std::memset(workspace.data(), 0, workspace.size_bytes());
  const auto timed = [&]() -> Result<double> {
    const auto start = std::chrono::steady_clock::now();
    NVFP4_MOE_TRY(layer.run(placed.batch(), workspace.data(), workspace.size_bytes()));
    if (const DeviceMemory* const memory = layer.backend().memory; memory != nullptr)
      NVFP4_MOE_TRY(memory->synchronize(layer.weights().device));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  TimedRun run;
  NVFP4_MOE_ASSIGN(run.seconds, timed());
  NVFP4_MOE_ASSIGN(run.status, layer.status(workspace.data(), workspace.size_bytes()));
  double taken = run.seconds;
  while (taken < repeat_seconds && std::ssize(run.again) < kMostRepeats) {
    NVFP4_MOE_ASSIGN(const double seconds, timed());
    run.again.push_back(seconds);
    taken += seconds;
  }
  std::sort(run.again.begin(), run.again.end());
  NVFP4_MOE_TRY(placed.fetch());
  return run;
}

}  // namespace nvfp4_moe::internal
