#include "parallel/peer_dispatch.h"

#include <algorithm>
#include <array>
#include <string>

#include "parallel/multiply.h"

namespace nvfp4_moe {

struct PeerDispatch::Spans : DispatchSpans {
  size_t size_bytes = 0;
};

PeerDispatch::PeerDispatch(const MoeLayer& layer, const DeviceSlots& slots, int rank, int world, int64_t max_tokens)
    : layer_(layer),
      slots_(slots),
      records_(*device_records(layer.plan().device.kind)),
      peers_(*device_peers(layer.plan().device.kind)),
      memory_(*layer.backend().memory),
      rank_(rank),
      world_(world),
      max_tokens_(max_tokens),
      record_(layer.config()),
      announcement_(world, 1),
      sides_(layer) {}

Result<std::unique_ptr<PeerDispatch>> PeerDispatch::make(const MoeLayer& layer, const DeviceSlots& slots, int rank,
                                                         int world, int64_t max_tokens) {
  std::unique_ptr<PeerDispatch> made(new PeerDispatch(layer, slots, rank, world, max_tokens));
  NVFP4_MOE_ASSIGN(made->report_, DeviceReport::make(layer));
  return made;
}

Status PeerDispatch::connect(PeerMemory& peers) {
  link_ = peers.link();
  NVFP4_MOE_ASSIGN(const PeerMemory::Region records,
                   peers.reserve(PeerRegion::kRecords, world_ * max_tokens_ * record_.bytes));
  NVFP4_MOE_ASSIGN(const PeerMemory::Region record_marks,
                   peers.reserve(PeerRegion::kRecordMarks, world_ * max_tokens_ * int64_t{sizeof(uint32_t)}));
  NVFP4_MOE_ASSIGN(const PeerMemory::Region rows,
                   peers.reserve(PeerRegion::kRows, max_tokens_ * record_.top_k * record_.row_bytes));
  NVFP4_MOE_ASSIGN(const PeerMemory::Region row_marks,
                   peers.reserve(PeerRegion::kRowMarks, max_tokens_ * record_.top_k * int64_t{sizeof(uint32_t)}));
  record_region_ = records.addresses;
  record_mark_region_ = record_marks.addresses;
  row_region_ = rows.addresses;
  row_mark_region_ = row_marks.addresses;
  return {};
}

PeerDispatch::Spans PeerDispatch::spans(std::byte* workspace, int64_t tokens) const {
  Arena arena(workspace, layer_.plan().limits.guard_bytes);
  Spans spans;
  spans.take(layer_, tokens, world_ * max_tokens_, arena);
  spans.size_bytes = arena.size_bytes();
  return spans;
}

size_t PeerDispatch::workspace_bytes(int64_t tokens) const { return spans(nullptr, tokens).size_bytes; }

DispatchSide PeerDispatch::home(const Spans& spans, const Batch& batch) {
  return sides_.home(spans, batch, row_region_.of_rank[rank_]);
}

DispatchSide PeerDispatch::owner(const Spans& spans) {
  int64_t records = 0;
  for (int home = 0; home < world_; ++home) records += announcement_.tokens(home);
  return sides_.owner(spans, records);
}

// What needs no memory of others, of a batch that no single kernel takes.
Status PeerDispatch::prepare(const Batch& batch, const Spans& s, void* stream) {
  const LayerSteps& steps = *layer_.backend().steps;
  const DispatchSide side = home(s, batch);
  const StepContext step = side.step(layer_.weights(), stream);
  if (peers_.pushes_tokens(step, steps)) return {};
  NVFP4_MOE_TRY(slots_.enqueue(batch, rank_, s.slots, stream));
  NVFP4_MOE_TRY(steps.route(step));  // of this rank's slots, which nobody asks for: it clears and counts
  // Before quantize, which leaves out tokens that have no row.
  const AssignRows assign{link_, s.slots, side.buffers.row_of_assignment, batch.tokens * record_.top_k, s.failed};
  NVFP4_MOE_TRY(peers_.assign_rows(layer_.weights().device, assign, stream));
  return steps.quantize(step);
}

PushRecords PeerDispatch::records_of(const Spans& s, const DispatchSide& side) const {
  PushRecords push;
  push.link = link_;
  push.records = record_region_;
  push.marks = record_mark_region_;
  push.record_stride = max_tokens_;
  push.record = record_;
  const auto arrays =
      wire_arrays(side.buffers.routed.hidden, layer_.config()->activation_format, layer_.config()->hidden_size);
  std::copy(arrays.begin(), arrays.end(), push.arrays);
  push.slots = s.slots;
  push.weights = side.batch.topk_weights;
  push.first_of_rank = slots_.first_of_rank();
  push.tokens = side.batch.tokens;
  push.failed = s.failed;
  return push;
}

// Once all ranks have said that they run: whoever says no may be gone, and its memory with it.
Status PeerDispatch::push_records(const Batch& batch, const Spans& s, const DispatchSide& side, void* stream) {
  const LayerSteps& steps = *layer_.backend().steps;
  const StepContext step = side.step(layer_.weights(), stream);
  const PushRecords push = records_of(s, side);
  if (!peers_.pushes_tokens(step, steps)) return peers_.push_records(layer_.weights().device, push, stream);
  return peers_.push_tokens(step, steps, {slots_.call(batch, rank_, s.slots), push});
}

Status PeerDispatch::begin(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream, Status mine) {
  std::array<int64_t, 1> captured{};
  const auto enqueue = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const uint64_t capture, memory_.capture_id(stream));
    captured[0] = capture != 0 ? 1 : 0;
    return on_device_of(layer_, [&] { return prepare(batch, spans(workspace, batch.tokens), stream); });
  };
  if (mine.ok()) mine = enqueue();
  NVFP4_MOE_TRY(announcement_.gather(exchange, batch.tokens, mine, captured));
  for (int home = 0; home < world_; ++home)
    if (const int64_t tokens = announcement_.tokens(home); tokens > max_tokens_)  // its records would have no room
      return io_error("announcement of rank " + std::to_string(home) + ": expected at most " +
                      std::to_string(max_tokens_) + " tokens, got " + std::to_string(tokens));
  return all_capture_or_none(announcement_, world_, 0);
}

Status PeerDispatch::work(const Spans& s, const StepContext& home, const DispatchSide& owner, void* stream) {
  const LayerSteps& steps = *layer_.backend().steps;
  TakeRecords take;
  take.layout = RecordLayout(record_, world_, max_tokens_, false);
  take.messages = record_region_.of_rank[rank_];
  take.range = layer_.weights().range;
  take.ids = s.ids;
  take.weights = s.weights;
  take.peers.record_stride = max_tokens_;
  take.peers.marks = reinterpret_cast<const uint32_t*>(record_mark_region_.of_rank[rank_]);
  for (int home = 0; home < world_; ++home)
    take.peers.first_of_home[home + 1] =
        take.peers.first_of_home[home] + static_cast<int32_t>(announcement_.tokens(home));
  take.wait = link_.wait;
  take.failed = s.failed;
  take.report = report_.on_device();
  const StepContext step = owner.step(layer_.weights(), stream);
  if (owner.batch.tokens > 0) {
    NVFP4_MOE_TRY(records_.take(step, steps, take));
    NVFP4_MOE_TRY(multiply(steps, step, owner.buffers.routed));
  }
  PushRows push;
  push.link = link_;
  push.rows = row_region_;
  push.marks = row_mark_region_;
  push.record = record_;
  push.rows_out = owner.buffers.routed.rows_out;
  push.row_of_assignment = owner.buffers.row_of_assignment;
  push.ids = s.ids;
  push.records = owner.batch.tokens;
  push.messages = take.peers;
  push.owner = owner.batch.tokens > 0 ? owner.buffers.status : nullptr;
  push.counts_tokens = peers_.pushes_tokens(home, steps);
  return peers_.push_rows(home, push);
}

Status PeerDispatch::run(Exchange&, const Batch& batch, std::byte* workspace, void* stream) {
  const LayerSteps& steps = *layer_.backend().steps;
  const Spans s = spans(workspace, batch.tokens);
  const DispatchSide at_home = home(s, batch), at_owner = owner(s);
  AwaitedRows awaited;
  awaited.failed = s.failed;
  awaited.wait = link_.wait;
  awaited.world = world_;
  awaited.marks = reinterpret_cast<const uint32_t*>(row_mark_region_.of_rank[rank_]);
  awaited.slots = s.slots;
  awaited.first_of_rank = slots_.first_of_rank();
  const auto enqueue = [&]() -> Status {
    const StepContext step = at_home.step(layer_.weights(), stream, &awaited);
    NVFP4_MOE_TRY(push_records(batch, s, at_home, stream));
    NVFP4_MOE_TRY(work(s, step, at_owner, stream));
    if (batch.tokens > 0 && at_home.buffers.shared.experts > 0)
      NVFP4_MOE_TRY(multiply(steps, step, at_home.buffers.shared));
    return steps.combine(step);
  };
  return on_device_of(layer_, enqueue);
}

Status PeerDispatch::report(void* stream) const {
  NVFP4_MOE_ASSIGN(const WireReport seen, report_.take(layer_, stream));
  return seen.wrong == 0 ? Status() : DeviceReport::wrong_records(rank_, seen.wrong);
}

}  // namespace nvfp4_moe
