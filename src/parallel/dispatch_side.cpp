#include "parallel/dispatch_side.h"

#include <string>

namespace nvfp4_moe {

void DispatchSpans::take(const MoeLayer& layer, int64_t tokens, int64_t received, Arena& arena) {
  const PackedWeights& packed = layer.weights();
  const int64_t k = layer.config()->top_k;
  const auto bytes_of = [&](int64_t most) {
    return static_cast<int64_t>(layer.backend().workspace_bytes(packed.config, packed.range, layer.plan(), most));
  };
  status = arena.take<RunStatus>("", "status", 1);
  failed = arena.take<uint32_t>("", "failed", 1);
  slots = arena.take<int32_t>("", "slots", tokens * k);
  ids = arena.take<int32_t>("", "ids", received * k);
  weights = arena.take<float>("", "weights", received * k);
  home = arena.take<std::byte>("", "home", bytes_of(tokens));
  owner = arena.take<std::byte>("", "owner", bytes_of(received));
}

DispatchSide DispatchSides::home(const DispatchSpans& spans, const Batch& batch, void* rows_out) {
  Batch mine = batch;
  mine.topk_ids = spans.slots;
  mine.ids_dtype = DType::kI32;
  DispatchSide side(layer_, mine, spans.home);
  side.buffers.status = spans.status;
  if (rows_out != nullptr) side.buffers.routed.rows_out = rows_out;
  side.plan = home_plan_.of(layer_, side.batch);
  return side;
}

DispatchSide DispatchSides::owner(const DispatchSpans& spans, int64_t records) {
  Batch mine;
  mine.tokens = records;
  mine.topk_ids = spans.ids;
  mine.topk_weights = spans.weights;
  DispatchSide side(layer_, mine, spans.owner);
  side.plan = owner_plan_.of(layer_, side.batch);
  return side;
}

Result<DeviceReport> DeviceReport::make(const MoeLayer& layer) {
  const DeviceMemory& memory = *layer.backend().memory;
  const int device = layer.weights().device;
  DeviceReport made;
  const WireReport none;
  NVFP4_MOE_ASSIGN(made.report_, memory.allocate(sizeof(WireReport), device, "report of all_to_all"));
  NVFP4_MOE_TRY(memory.to_device(device, made.report_.data(), &none, sizeof(none), nullptr));
  return made;
}

Result<WireReport> DeviceReport::take(const MoeLayer& layer, void* stream) const {
  const DeviceMemory& memory = *layer.backend().memory;
  const int device = layer.weights().device;
  WireReport seen;
  const WireReport none;
  NVFP4_MOE_TRY(memory.to_host(device, &seen, report_.data(), sizeof(seen), stream));
  if (seen.runs > 0 || seen.wrong > 0)
    NVFP4_MOE_TRY(memory.to_device(device, report_.data(), &none, sizeof(none), stream));
  return seen;
}

Status DeviceReport::wrong_records(int rank, uint64_t count) {
  return io_error("dispatch: expected records of slots of rank " + std::to_string(rank) + ", got " +
                  std::to_string(count) + " others; out is NaN");
}

}  // namespace nvfp4_moe
