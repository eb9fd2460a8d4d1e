#include "parallel/device_all_to_all.h"

#include <algorithm>
#include <string>

#include "moe/registry.h"
#include "parallel/connect.h"

namespace nvfp4_moe::internal {

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
                                   std::unique_ptr<DeviceSlots> slots, Buffer report)
    : RankCombine(layer, ranks),
      slots_(std::move(slots)),
      packet_steps_(*device_packets(layer.plan().device.kind)),
      packet_(layer.weights().config),
      report_(std::move(report)) {}

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
  mine.topk_ids = spans.slots, mine.ids_dtype = DType::kI32;
  Side made = side(mine, spans.source);
  made.buffers.status = spans.status;
  if (void* const rows = rows_out(spans); rows != nullptr) made.buffers.routed.rows_out = rows;
  made.plan = source_plan_.of(layer_, mine);
  return made;
}

TokensToSend AllToAllOnDevice::tokens_of(const Spans& spans, const Side& source) const {
  const MoeConfig& config = layer_.weights().config;
  TokensToSend from{{}, spans.slots, source.batch.topk_weights, slots_->first_of_rank()};
  std::ranges::copy(
      wire_arrays(source.buffers.routed.hidden, config->activation_format, config->hidden_size),
      from.arrays);
  return from;
}

UnpackPackets AllToAllOnDevice::take_call(const Spans& spans, const MessageLayout& layout,
                                          const std::byte* packets) const {
  UnpackPackets unpack;
  unpack.layout = layout, unpack.messages = packets, unpack.range = layer_.weights().range;
  unpack.ids = spans.ids, unpack.weights = spans.weights, unpack.failed = spans.failed;
  unpack.report = reinterpret_cast<WireReport*>(report_.data());
  return unpack;
}

Status AllToAllOnDevice::begin(const Batch& batch, std::byte* workspace, void* stream,
                               Status mine) {
  bool captured = false;
  const auto enqueue = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const uint64_t capture, layer_.backend().memory->capture_id(stream));
    captured = capture != 0;
    return on_device(*device_ranks(layer_.plan().device.kind), device(), [&] {
      return prepare(batch, spans(workspace, batch.tokens), captured, stream);
    });
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
  return on_device(*device_ranks(layer_.plan().device.kind), device(), [&]() -> Status {
    const StepContext step = at_source.step(layer_.weights(), stream, &awaited);
    NVFP4_MOE_TRY(dispatch(batch, s, at_source, stream));
    NVFP4_MOE_TRY(work(s, step, at_expert, stream));
    if (batch.tokens > 0 && at_source.buffers.shared.experts > 0)
      NVFP4_MOE_TRY(multiply(steps(), step, at_source.buffers.shared));
    return steps().combine(step);
  });
}

Status AllToAllOnDevice::report(void* stream) {
  const DeviceMemory& memory = *layer_.backend().memory;
  WireReport seen;
  const WireReport none;
  NVFP4_MOE_TRY(memory.to_host(device(), &seen, report_.data(), sizeof(seen), stream));
  if (seen.runs > 0 || seen.wrong > 0)
    NVFP4_MOE_TRY(memory.to_device(device(), report_.data(), &none, sizeof(none), stream));
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

DeviceAllToAll::DeviceAllToAll(MoeLayer& layer, const Ranks& ranks,
                               std::unique_ptr<DeviceSlots> slots, Buffer report)
    : AllToAllOnDevice(layer, ranks, std::move(slots), std::move(report)),
      counts_(world(), ranks.capacity, ranks.fixed, top_k()),
      send_bytes_(static_cast<size_t>(world())),
      recv_bytes_(static_cast<size_t>(world())),
      bounds_(2 * (static_cast<size_t>(world()) + 1)) {}

void DeviceAllToAll::take_more(Spans& spans, int64_t tokens, Arena& arena) const {
  const int64_t headers = world() * layout_of(tokens).header_bytes, row_bytes = packet_.row_bytes;
  spans.counts = arena.take<int64_t>("", "counts", 2 * world());
  spans.bounds = arena.take<int32_t>("", "bounds", 2 * (world() + 1));
  spans.sources = arena.take<PacketSource>("", "sources", counts_.sent(tokens));
  spans.send = arena.take<std::byte>("", "send", counts_.sent(tokens) * packet_.bytes + headers);
  spans.recv = arena.take<std::byte>("", "recv", received() * packet_.bytes + headers);
  spans.first_rows = arena.take<int32_t>("", "first_rows", received());
  spans.send_rows = arena.take<std::byte>("", "send_rows", received() * top_k() * row_bytes);
  spans.recv_rows = arena.take<std::byte>(
      "", "recv_rows", counts_.fixed() ? counts_.rows_back(tokens) * row_bytes : 0);
}

int64_t DeviceAllToAll::packets() const {
  int64_t packets = 0;
  for (int from = 0; from < world(); ++from) packets += counts_.packets_between(from, rank());
  return packets;
}

// The host waits only for the counts; the device keeps working while the ranks exchange them.
Status DeviceAllToAll::prepare(const Batch& batch, const Spans& s, bool captured, void* stream) {
  if (captured && !counts_.fixed())
    return unsupported(
        "stream: expected one that is not captured for all_to_all without a capacity, whose counts "
        "the host waits for, got one that is");
  NVFP4_MOE_TRY(slots_->translate(batch, rank(), s.slots, stream));
  const CountPackets counted{s.slots, slots_->first_of_rank(), batch.tokens, top_k(), world(),
                             s.counts};
  NVFP4_MOE_TRY(packet_steps_.count(device(), counted, stream));
  int64_t packets = counts_.sent(batch.tokens);
  if (!counts_.fixed()) {
    const std::span<int64_t> counts = counts_.own();
    NVFP4_MOE_TRY(layer_.backend().memory->to_host(device(), counts.data(), s.counts,
                                                   counts.size_bytes(), stream));
    packets = 0;
    for (size_t at = 0; at < counts.size(); at += 2) packets += counts[at];
  }
  const Side side = source(s, batch);
  const StepContext step = side.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(steps().route(step));  // its rows are not used: it clears status and counters
  const MessageLayout layout = layout_of(batch.tokens);
  NVFP4_MOE_TRY(packet_steps_.scan(
      device(), {layout, counted, s.sources, side.buffers.row_of_assignment, s.send, s.failed},
      stream));
  NVFP4_MOE_TRY(steps().quantize(step));
  return packet_steps_.pack(device(), {layout, tokens_of(s, side), s.sources, packets, s.send},
                            stream);
}

Status DeviceAllToAll::gather(int64_t tokens, const Status& mine, bool captured) {
  captured_ = captured;
  if (!mine.ok() || counts_.fixed()) std::ranges::fill(counts_.own(), 0);
  return counts_.gather(exchange(), tokens, mine, captured);
}

Status DeviceAllToAll::dispatch(const Batch&, const Spans& s, const Side&, void* stream) {
  const int64_t header_bytes = layout_of(0).header_bytes;
  for (int r = 0; r < world(); ++r) {
    const auto at = static_cast<size_t>(r);
    send_bytes_[at] = header_bytes + counts_.packets_between(rank(), r) * packet_.bytes;
    recv_bytes_[at] = header_bytes + counts_.packets_between(r, rank()) * packet_.bytes;
  }
  const AllToAll call{"dispatch",          s.send, send_bytes_.data(), s.recv, recv_bytes_.data(),
                      exchange().timeout()};
  return exchange().device()->all_to_all_v(call, stream, captured_);
}

Status DeviceAllToAll::run_experts(const Spans& s, const Side& expert, void* stream) {
  // An expert rank's messages have their source ranks' lengths.
  UnpackPackets unpack = take_call(s, layout_of(0), s.recv);
  unpack.first_rows = s.first_rows;
  auto* const packets = bounds_.data();
  auto* const rows = packets + world() + 1;
  for (int r = 0; r < world(); ++r) {
    packets[r + 1] = packets[r] + static_cast<int32_t>(counts_.packets_between(r, rank()));
    rows[r + 1] = rows[r] + static_cast<int32_t>(counts_.rows_back_between(r, rank()));
  }
  unpack.bounds = s.bounds, unpack.capacity = counts_.capacity();
  NVFP4_MOE_TRY(packet_steps_.write_words(device(), bounds_.data(),
                                          static_cast<int64_t>(bounds_.size()), s.bounds, stream));
  const StepContext step = expert.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(packet_steps_.unpack(step, steps(), unpack));
  NVFP4_MOE_TRY(multiply(steps(), step, expert.buffers.routed));
  return packet_steps_.pack_rows(
      device(),
      {packet_, expert.buffers.routed.rows_out, expert.buffers.row_of_assignment, s.ids,
       s.first_rows, expert.batch.tokens, s.send_rows, s.status, expert.buffers.status},
      stream);
}

Status DeviceAllToAll::work(const Spans& s, const StepContext& source, const Side& expert,
                            void* stream) {
  if (expert.batch.tokens > 0) NVFP4_MOE_TRY(run_experts(s, expert, stream));
  for (int r = 0; r < world(); ++r) {
    const auto at = static_cast<size_t>(r);
    send_bytes_[at] = counts_.rows_back_between(r, rank()) * packet_.row_bytes;
    recv_bytes_[at] = counts_.rows_back_between(rank(), r) * packet_.row_bytes;
  }
  auto* const rows = static_cast<std::byte*>(source.buffers.routed.rows_out);
  const AllToAll call{"rows back", s.send_rows,        send_bytes_.data(),
                      rows,        recv_bytes_.data(), exchange().timeout()};
  return exchange().device()->all_to_all_v(call, stream, captured_);
}

void DeviceAllToAll::await(AwaitedRows& awaited, const Spans&) const {
  awaited.link_failed = exchange().device()->failure_word();
}

Result<std::unique_ptr<RankCombine>> make_device_all_to_all(MoeLayer& layer, const Ranks& ranks) {
  using Made = std::unique_ptr<RankCombine>;
  NVFP4_MOE_ASSIGN(auto slots, DeviceSlots::make(layer, ranks.placement));
  const DeviceMemory& memory = *layer.backend().memory;
  const int device = layer.weights().device;
  const WireReport none;
  NVFP4_MOE_ASSIGN(Buffer report, memory.allocate(sizeof(none), device, "report of all_to_all"));
  NVFP4_MOE_TRY(memory.to_device(device, report.data(), &none, sizeof(none), nullptr));
  if (ranks.exchange->peers() == nullptr)
    return Made(
        std::make_unique<DeviceAllToAll>(layer, ranks, std::move(slots), std::move(report)));
  return Made(std::make_unique<PeerAllToAll>(layer, ranks, std::move(slots), std::move(report)));
}

}  // namespace nvfp4_moe::internal
