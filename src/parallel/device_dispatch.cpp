#include "parallel/device_dispatch.h"

#include <algorithm>
#include <string>

#include "core/arena.h"
#include "moe/registry.h"
#include "parallel/multiply.h"

namespace nvfp4_moe {

// T tokens of this rank, U of all ranks for this one at most.
struct DeviceDispatch::Spans : DispatchSpans {
  int64_t* counts = nullptr;        // (world, 2)
  int32_t* bounds = nullptr;        // (2, world + 1)
  RecordSource* sources = nullptr;  // of the records that are sent
  std::byte* send = nullptr;        // records for all ranks
  std::byte* recv = nullptr;        // (U) records
  int32_t* first_rows = nullptr;    // (U)
  std::byte* send_rows = nullptr;   // (U k) rows, for the ranks that asked
  std::byte* recv_rows = nullptr;   // under a capacity; else they come to rows_out at home
  size_t size_bytes = 0;
};

DeviceDispatch::DeviceDispatch(const MoeLayer& layer, const DeviceSlots& slots, int rank, int world, int64_t capacity,
                               bool fixed)
    : layer_(layer),
      slots_(slots),
      records_(*device_records(layer.plan().device.kind)),
      memory_(*layer.backend().memory),
      rank_(rank),
      world_(world),
      sizes_(world, capacity, fixed, layer.config()->top_k, 1),
      record_(layer.config()),
      counts_(2 * static_cast<size_t>(world) + 1),
      send_bytes_(static_cast<size_t>(world)),
      recv_bytes_(static_cast<size_t>(world)),
      bounds_(2 * (static_cast<size_t>(world) + 1)),
      sides_(layer) {}

Result<std::unique_ptr<DeviceDispatch>> DeviceDispatch::make(const MoeLayer& layer, const DeviceSlots& slots, int rank,
                                                             int world, int64_t capacity, bool fixed) {
  std::unique_ptr<DeviceDispatch> made(new DeviceDispatch(layer, slots, rank, world, capacity, fixed));
  NVFP4_MOE_ASSIGN(made->report_, DeviceReport::make(layer));
  return made;
}

DeviceDispatch::Spans DeviceDispatch::spans(std::byte* workspace, int64_t tokens) const {
  const int64_t received = sizes_.received(), sent = sizes_.sent(tokens), k = record_.top_k;
  const int64_t row_bytes = record_.row_bytes, headers = world_ * layout_of(tokens).header_bytes;
  Arena arena(workspace, layer_.plan().limits.guard_bytes);
  Spans spans;
  spans.take(layer_, tokens, received, arena);
  spans.counts = arena.take<int64_t>("", "counts", 2 * world_);
  spans.bounds = arena.take<int32_t>("", "bounds", 2 * (world_ + 1));
  spans.sources = arena.take<RecordSource>("", "sources", sent);
  spans.send = arena.take<std::byte>("", "send", sent * record_.bytes + headers);
  spans.recv = arena.take<std::byte>("", "recv", received * record_.bytes + headers);
  spans.first_rows = arena.take<int32_t>("", "first_rows", received);
  spans.send_rows = arena.take<std::byte>("", "send_rows", received * k * row_bytes);
  spans.recv_rows = arena.take<std::byte>("", "recv_rows", sizes_.fixed() ? sizes_.rows_back(tokens) * row_bytes : 0);
  spans.size_bytes = arena.size_bytes();
  return spans;
}

size_t DeviceDispatch::workspace_bytes(int64_t tokens) const { return spans(nullptr, tokens).size_bytes; }

DispatchSide DeviceDispatch::home(const Spans& spans, const Batch& batch) {
  return sides_.home(spans, batch, sizes_.fixed() ? spans.recv_rows : nullptr);
}

DispatchSide DeviceDispatch::owner(const Spans& spans) {
  int64_t records = 0;
  for (int from = 0; from < world_; ++from) records += sizes_.records_between(from, rank_);
  return sides_.owner(spans, records);
}

// All that needs nothing of other ranks. The host waits for the counts alone, and so the device works on while the ranks
// tell them each other.
Status DeviceDispatch::prepare(const Batch& batch, const Spans& s, void* stream) {
  const int device = layer_.weights().device;
  const LayerSteps& steps = *layer_.backend().steps;
  NVFP4_MOE_TRY(slots_.enqueue(batch, rank_, s.slots, stream));
  const CountRecords counted{s.slots, slots_.first_of_rank(), batch.tokens, record_.top_k, world_, s.counts};
  NVFP4_MOE_TRY(records_.count(device, counted, stream));
  int64_t records = sizes_.sent(batch.tokens);
  if (!sizes_.fixed()) {
    const size_t bytes = 2 * static_cast<size_t>(world_) * sizeof(int64_t);
    NVFP4_MOE_TRY(memory_.to_host(device, counts_.data(), s.counts, bytes, stream));
    records = 0;
    for (size_t rank = 0; rank < static_cast<size_t>(world_); ++rank) records += counts_[2 * rank];
  }
  const DispatchSide side = home(s, batch);
  const StepContext step = side.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(steps.route(step));  // of this rank's slots, which nobody asks for: it clears and counts
  NVFP4_MOE_TRY(records_.scan(
      device, {layout_of(batch.tokens), counted, s.sources, side.buffers.row_of_assignment, s.send, s.failed}, stream));
  NVFP4_MOE_TRY(steps.quantize(step));
  PackRecords pack;
  pack.layout = layout_of(batch.tokens);
  const auto arrays =
      wire_arrays(side.buffers.routed.hidden, layer_.config()->activation_format, layer_.config()->hidden_size);
  std::copy(arrays.begin(), arrays.end(), pack.arrays);
  pack.slots = s.slots;
  pack.weights = batch.topk_weights;
  pack.first_of_rank = slots_.first_of_rank();
  pack.sources = s.sources;
  pack.records = records;
  pack.messages = s.send;
  return records_.pack(device, pack, stream);
}

Status DeviceDispatch::begin(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream, Status mine) {
  std::fill(counts_.begin(), counts_.end(), 0);
  const auto enqueue = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const uint64_t capture, memory_.capture_id(stream));
    captured_ = capture != 0;
    if (captured_ && !sizes_.fixed())
      return unsupported(
          "stream: expected one that is not captured for all_to_all without a capacity, whose counts the "
          "host waits for, got one that is");
    return on_device_of(layer_, [&] { return prepare(batch, spans(workspace, batch.tokens), stream); });
  };
  if (mine.ok()) mine = enqueue();
  counts_.back() = captured_ ? 1 : 0;
  NVFP4_MOE_TRY(sizes_.announce(exchange, batch.tokens, mine, counts_));
  return all_capture_or_none(sizes_.announcement(), world_, sizes_.first_more());
}

Status DeviceDispatch::send_records(Exchange& exchange, const Spans& s, void* stream) {
  const int64_t header_bytes = layout_of(0).header_bytes;
  for (int r = 0; r < world_; ++r) {
    const auto at = static_cast<size_t>(r);
    send_bytes_[at] = header_bytes + sizes_.records_between(rank_, r) * record_.bytes;
    recv_bytes_[at] = header_bytes + sizes_.records_between(r, rank_) * record_.bytes;
  }
  const AllToAll call{"dispatch", s.send, send_bytes_.data(), s.recv, recv_bytes_.data(), exchange.timeout()};
  return exchange.device()->all_to_all_v(call, stream, captured_);
}

Status DeviceDispatch::work(const Spans& s, const DispatchSide& owner, void* stream) {
  const int device = layer_.weights().device;
  const LayerSteps& steps = *layer_.backend().steps;
  TakeRecords take;
  take.layout = layout_of(0);  // an owner's messages are of the homes' lengths
  take.messages = s.recv;
  take.range = layer_.weights().range;
  take.ids = s.ids;
  take.weights = s.weights;
  take.first_rows = s.first_rows;
  take.failed = s.failed;
  take.report = report_.on_device();
  auto* const records = bounds_.data();
  auto* const rows = records + world_ + 1;
  for (int r = 0; r < world_; ++r) {
    records[r + 1] = records[r] + static_cast<int32_t>(sizes_.records_between(r, rank_));
    rows[r + 1] = rows[r] + static_cast<int32_t>(sizes_.rows_back_between(r, rank_));
  }
  take.bounds = s.bounds;
  take.capacity = sizes_.capacity();
  NVFP4_MOE_TRY(records_.put(device, bounds_.data(), static_cast<int64_t>(bounds_.size()), s.bounds, stream));
  const StepContext step = owner.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(records_.take(step, steps, take));
  NVFP4_MOE_TRY(multiply(steps, step, owner.buffers.routed));
  return records_.pack_rows(device,
                            {record_, owner.buffers.routed.rows_out, owner.buffers.row_of_assignment, s.ids,
                             s.first_rows, owner.batch.tokens, s.send_rows, s.status, owner.buffers.status},
                            stream);
}

Status DeviceDispatch::send_rows(Exchange& exchange, const Spans& s, void* rows, void* stream) {
  for (int r = 0; r < world_; ++r) {
    const auto at = static_cast<size_t>(r);
    send_bytes_[at] = sizes_.rows_back_between(r, rank_) * record_.row_bytes;
    recv_bytes_[at] = sizes_.rows_back_between(rank_, r) * record_.row_bytes;
  }
  const AllToAll call{"rows back",        s.send_rows,       send_bytes_.data(), static_cast<std::byte*>(rows),
                      recv_bytes_.data(), exchange.timeout()};
  return exchange.device()->all_to_all_v(call, stream, captured_);
}

Status DeviceDispatch::run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream) {
  const LayerSteps& steps = *layer_.backend().steps;
  const Spans s = spans(workspace, batch.tokens);
  const DispatchSide at_home = home(s, batch), at_owner = owner(s);
  AwaitedRows awaited;
  awaited.failed = s.failed;
  awaited.link_failed = exchange.device()->failure_word();
  const auto enqueue = [&]() -> Status {
    NVFP4_MOE_TRY(send_records(exchange, s, stream));
    if (at_owner.batch.tokens > 0) NVFP4_MOE_TRY(work(s, at_owner, stream));
    NVFP4_MOE_TRY(send_rows(exchange, s, at_home.buffers.routed.rows_out, stream));
    const StepContext step = at_home.step(layer_.weights(), stream, &awaited);
    if (batch.tokens > 0 && at_home.buffers.shared.experts > 0)
      NVFP4_MOE_TRY(multiply(steps, step, at_home.buffers.shared));
    return steps.combine(step);
  };
  return on_device_of(layer_, enqueue);
}

Status DeviceDispatch::report(void* stream) const {
  NVFP4_MOE_ASSIGN(const WireReport seen, report_.take(layer_, stream));
  if (seen.runs == 0 && seen.wrong == 0) return {};
  if (seen.wrong > 0) return DeviceReport::wrong_records(rank_, seen.wrong);
  const Status most = MessageSizes::too_many(static_cast<int64_t>(seen.most >> 32), seen.most >> 16 & 0xFFFF,
                                             seen.most & 0xFFFF, sizes_.capacity());
  return {most.code(), most.message() + "; out is NaN on every rank in " + std::to_string(seen.runs) +
                           (seen.runs == 1 ? " run" : " runs") + " since status was last asked for"};
}

}  // namespace nvfp4_moe
