// Replaces an expert of an open layer, either in place or in the order of a device's stream.
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "moe/layer.h"
#include "moe/layer_debug.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

// A run only enqueues, and new ones are held off, so a pause between runs comes soon. Over ranks a
// run waits for other ranks.
constexpr std::chrono::seconds kLongestWait{10};

Status busy(const WeightUses::Replacement& refused) {
  const int64_t calls = refused.in_flight();
  return {Code::kBusy,
          "replace: expected a layer at rest, got " +
              (calls < 0 ? std::string("another replacement") : std::to_string(calls) + " calls") +
              " in flight"};
}

}  // namespace

Status MoeLayer::note_capture(void* stream) const {
  if (backend_->memory == nullptr || captured_.load(std::memory_order_relaxed)) return {};
  NVFP4_MOE_ASSIGN(const uint64_t capture, backend_->memory->capture_id(stream));
  if (capture != 0) captured_.store(true, std::memory_order_relaxed);
  return {};
}

Status MoeLayer::check_replacement(int64_t local_expert, const ExpertSource& source) const {
  NVFP4_MOE_TRY(check_process("replace"));
  NVFP4_MOE_TRY(check_local_expert(local_expert));
  return check_source(source, local_expert);
}

Status MoeLayer::replace_expert(int64_t local_expert, const ExpertSource& source) {
  return replace_in_place(local_expert, source, false);
}

Status MoeLayer::replace_expert_at_rest(int64_t local_expert, const ExpertSource& source) {
  return replace_in_place(local_expert, source, true);
}

Status MoeLayer::replace_in_place(int64_t local_expert, const ExpertSource& source,
                                  bool captured_too) {
  NVFP4_MOE_TRY(check_replacement(local_expert, source));
  RowCheck* const rows = debug_ ? debug_->rows.get() : nullptr;
  const RowCheck::Hold held = rows != nullptr ? rows->hold() : RowCheck::Hold();
  const WeightUses::Replacement replacement(uses_);
  if (!replacement) return busy(replacement);
  if (captured_.load(std::memory_order_relaxed) && !captured_too)
    return invalid_argument(
        "replace: expected a stream, since a graph has captured this layer and may be replayed at "
        "any time: call "
        "replace_expert_on_stream (in Python replace_expert(..., stream=)) with the stream that "
        "replays it");
  // On a device a run may continue after its call has returned. No new one starts.
  if (backend_->memory != nullptr) NVFP4_MOE_TRY(backend_->memory->synchronize(weights_->device));
  const std::lock_guard no_fork(replacing_);
  const Status packed = backend_->pack_expert(*weights_, local_expert, source);
  weights_->staging = {};
  // Also after a failure, which may have written a part.
  if (rows != nullptr) NVFP4_MOE_TRY(rows->replaced(local_expert, nullptr, true));
  NVFP4_MOE_TRY(packed);
  if (debug_ && debug_->reference) return debug_->reference->replace_expert(local_expert, source);
  return {};
}

Status MoeLayer::replace_expert_on_stream(int64_t local_expert, const ExpertSource& source,
                                          void* stream) {
  NVFP4_MOE_TRY(check_replacement(local_expert, source));
  const DeviceReplacement* const device = device_replacement(plan_.device.kind);
  if (device == nullptr)
    return invalid_argument(std::string("replace: expected no stream (backend ") + backend_->name +
                            " runs in host memory), got one");
  NVFP4_MOE_ASSIGN(const uint64_t capture, backend_->memory->capture_id(stream));
  if (capture != 0)
    return invalid_argument(
        "replace: expected a stream that is not being captured, got one that is");
  NVFP4_MOE_ASSIGN(StagedExpert staged,
                   device->stage(*weights_, local_expert, source, backend_->pack_expert));
  RowCheck* const rows = debug_ ? debug_->rows.get() : nullptr;
  // Before runs are held off: they must not wait for the check.
  const RowCheck::Hold held = rows != nullptr ? rows->hold() : RowCheck::Hold();
  const WeightUses::HoldOff hold_off(uses_);
  const auto until = std::chrono::steady_clock::now() + kLongestWait;
  while (true) {
    // Not between the kernels of a run: another thread may be enqueuing one in this same stream.
    const WeightUses::Replacement replacement(uses_, true);
    if (replacement) {
      NVFP4_MOE_TRY(device->put(*weights_, local_expert, staged, last_replacement_, stream));
      return rows != nullptr ? rows->replaced(local_expert, stream, false) : Status();
    }
    if (std::chrono::steady_clock::now() > until) return busy(replacement);
    std::this_thread::yield();
  }
}

}  // namespace nvfp4_moe::internal
