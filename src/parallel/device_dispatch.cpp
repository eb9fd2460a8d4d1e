// The parts of a run of all-to-all that both device transports share.
#include <string>

#include "moe/registry.h"
#include "parallel/device_all_to_all.h"

namespace nvfp4_moe::internal {

Result<DeviceReport> DeviceReport::make(const MoeLayer& layer) {
  const DeviceMemory& memory = *layer.backend().memory;
  const int device = layer.weights().device;
  DeviceReport made;
  const WireReport none;
  NVFP4_MOE_ASSIGN(made.report_,
                   memory.allocate(sizeof(WireReport), device, "report of all_to_all"));
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

const RunPlan* AllToAllOnDevice::LastPlan::of(const MoeLayer& layer, const Batch& batch) {
  const bool aligned = reinterpret_cast<uintptr_t>(batch.hidden) % 16 == 0;
  if (tokens_ != batch.tokens || hidden_dtype_ != batch.hidden_dtype ||
      hidden_aligned_ != aligned) {
    tokens_ = batch.tokens, hidden_dtype_ = batch.hidden_dtype, hidden_aligned_ = aligned;
    plan_ = layer.backend().steps->plan(layer.weights(), layer.plan(), batch);
  }
  return plan_.get();
}

AllToAllOnDevice::AllToAllOnDevice(MoeLayer& layer, const Ranks& ranks,
                                   std::unique_ptr<DeviceSlots> slots, DeviceReport report)
    : RankCombine(layer, ranks),
      slots_(std::move(slots)),
      packet_steps_(*device_packets(layer.plan().device.kind)),
      packet_(layer.weights().config),
      report_(std::move(report)) {}

template <class Body>
Status AllToAllOnDevice::on_device(Body body) const {
  const auto call = [](void* argument) -> Status { return (*static_cast<Body*>(argument))(); };
  return device_ranks(layer_.plan().device.kind)->on_device(device(), call, &body);
}

AllToAllOnDevice::Spans AllToAllOnDevice::spans(std::byte* workspace, int64_t tokens) const {
  const PackedWeights& packed = layer_.weights();
  const auto bytes_of = [&](int64_t most) {
    return static_cast<int64_t>(
        layer_.backend().workspace_bytes(packed.config, packed.range, layer_.plan(), most));
  };
  Arena arena(workspace, layer_.plan().limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.failed = arena.take<uint32_t>("", "failed", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * top_k());
  spans.ids = arena.take<int32_t>("", "ids", received() * top_k());
  spans.weights = arena.take<float>("", "weights", received() * top_k());
  spans.source = arena.take<std::byte>("", "source", bytes_of(tokens));
  spans.expert = arena.take<std::byte>("", "expert", bytes_of(received()));
  take_more(spans, tokens, arena);
  spans.size_bytes = arena.size_bytes();
  return spans;
}

AllToAllOnDevice::Side AllToAllOnDevice::side(const Batch& batch, std::byte* workspace) const {
  Side side{batch, Arena(workspace, layer_.plan().limits.guard_bytes), {}, nullptr};
  side.buffers =
      layer_buffers(layer_.weights().config, layer_.weights().range, batch.tokens, side.arena);
  return side;
}

AllToAllOnDevice::Side AllToAllOnDevice::source(const Spans& spans, const Batch& batch) {
  Batch mine = batch;
  mine.topk_ids = spans.slots;
  mine.ids_dtype = DType::kI32;
  Side made = side(mine, spans.source);
  made.buffers.status = spans.status;
  if (void* const rows = rows_out(spans); rows != nullptr) made.buffers.routed.rows_out = rows;
  made.plan = source_plan_.of(layer_, mine);
  return made;
}

TakePackets AllToAllOnDevice::take_call(const Spans& spans, const MessageLayout& layout,
                                        const std::byte* packets) const {
  TakePackets take;
  take.layout = layout;
  take.messages = packets;
  take.range = layer_.weights().range;
  take.ids = spans.ids;
  take.weights = spans.weights;
  take.failed = spans.failed;
  take.report = report_.on_device();
  return take;
}

Status AllToAllOnDevice::begin(const Batch& batch, std::byte* workspace, void* stream,
                               Status mine) {
  bool captured = false;
  const auto enqueue = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const uint64_t capture, layer_.backend().memory->capture_id(stream));
    captured = capture != 0;
    return on_device(
        [&] { return prepare(batch, spans(workspace, batch.tokens), captured, stream); });
  };
  if (mine.ok()) mine = enqueue();
  return gather(batch.tokens, mine, captured);
}

Status AllToAllOnDevice::run(const Batch& batch, std::byte* workspace, void* stream) {
  const Spans s = spans(workspace, batch.tokens);
  const Side at_source = source(s, batch);
  Batch taken;
  taken.tokens = packets();
  taken.topk_ids = s.ids;
  taken.topk_weights = s.weights;
  Side at_expert = side(taken, s.expert);
  at_expert.plan = expert_plan_.of(layer_, taken);
  AwaitedRows awaited;
  awaited.failed = s.failed;
  await(awaited, s);
  return on_device([&]() -> Status {
    const StepContext step = at_source.step(layer_.weights(), stream, &awaited);
    NVFP4_MOE_TRY(dispatch(batch, s, at_source, stream));
    NVFP4_MOE_TRY(work(s, step, at_expert, stream));
    if (batch.tokens > 0 && at_source.buffers.shared.experts > 0)
      NVFP4_MOE_TRY(multiply(steps(), step, at_source.buffers.shared));
    return steps().combine(step);
  });
}

Status AllToAllOnDevice::report(void* stream) {
  NVFP4_MOE_ASSIGN(const WireReport seen, report_.take(layer_, stream));
  if (seen.wrong > 0)
    return io_error("dispatch: expected packets of slots of rank " + std::to_string(rank()) +
                    ", got " + std::to_string(seen.wrong) + " others; out is NaN");
  if (seen.runs == 0) return {};
  const Status most =
      PacketCounts::too_many(static_cast<int64_t>(seen.most >> 32), seen.most >> 16 & 0xFFFF,
                             seen.most & 0xFFFF, ranks_.capacity);
  return {most.code(), most.message() + "; out is NaN on every rank in " +
                           std::to_string(seen.runs) + (seen.runs == 1 ? " run" : " runs") +
                           " since status was last asked for"};
}

}  // namespace nvfp4_moe::internal
