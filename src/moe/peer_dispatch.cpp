#include "moe/peer_dispatch.h"

#include <algorithm>
#include <array>
#include <string>

#include "moe/multiply.h"

namespace nvfp4_moe {

// T tokens of this rank, U of all ranks.
struct PeerDispatch::Spans {
  RunStatus* status = nullptr;
  uint32_t* failed = nullptr;  // (1) why out is NaN; 0: it is not
  int32_t* slots = nullptr;    // (T, k)
  int32_t* ids = nullptr;      // (U, k) slots of this rank
  float* weights = nullptr;    // (U, k)
  std::byte* home = nullptr;   // a workspace of T tokens
  std::byte* owner = nullptr;  // a workspace of U tokens
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
      announcement_(world, 1) {}

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
  NVFP4_MOE_ASSIGN(const PeerMemory::Region rows,
                   peers.reserve(PeerRegion::kRows, max_tokens_ * record_.top_k * record_.row_bytes));
  record_region_ = records.addresses;
  row_region_ = rows.addresses;
  return {};
}

PeerDispatch::Spans PeerDispatch::spans(std::byte* workspace, int64_t tokens) const {
  const Plan& plan = layer_.plan();
  const PackedWeights& weights = layer_.weights();
  const int64_t received = world_ * max_tokens_, k = record_.top_k;
  const auto bytes_of = [&](int64_t most) {
    return static_cast<int64_t>(layer_.backend().workspace_bytes(weights.config, weights.range, plan, most));
  };
  Arena arena(workspace, plan.limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.failed = arena.take<uint32_t>("", "failed", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * k);
  spans.ids = arena.take<int32_t>("", "ids", received * k);
  spans.weights = arena.take<float>("", "weights", received * k);
  spans.home = arena.take<std::byte>("", "home", bytes_of(tokens));
  spans.owner = arena.take<std::byte>("", "owner", bytes_of(received));
  spans.size_bytes = arena.size_bytes();
  return spans;
}

size_t PeerDispatch::workspace_bytes(int64_t tokens) const { return spans(nullptr, tokens).size_bytes; }

DispatchSide PeerDispatch::home(const Spans& spans, const Batch& batch) {
  Batch mine = batch;
  mine.topk_ids = spans.slots;
  mine.ids_dtype = DType::kI32;
  DispatchSide side(layer_, mine, spans.home);
  side.buffers.routed.rows_out = row_region_.of_rank[rank_];
  side.plan = home_plan_.of(layer_, side.batch);
  return side;
}

DispatchSide PeerDispatch::owner(const Spans& spans) {
  Batch mine;
  for (int home = 0; home < world_; ++home) mine.tokens += announcement_.tokens(home);
  mine.topk_ids = spans.ids;
  mine.topk_weights = spans.weights;
  DispatchSide side(layer_, mine, spans.owner);
  side.plan = owner_plan_.of(layer_, side.batch);
  return side;
}

Status PeerDispatch::prepare(const Batch& batch, const Spans& s, void* stream) {
  const LayerSteps& steps = *layer_.backend().steps;
  NVFP4_MOE_TRY(slots_.enqueue(batch, rank_, s.slots, stream));
  const DispatchSide side = home(s, batch);
  const StepContext step = side.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(steps.route(step));  // of this rank's slots, which nobody asks for: it clears and counts
  // Before quantize, which leaves out tokens that have no row.
  NVFP4_MOE_TRY(peers_.assign_rows(layer_.weights().device, s.slots, batch.tokens * record_.top_k,
                                   side.buffers.row_of_assignment, stream));
  return steps.quantize(step);
}

// Once all ranks have said that they run: whoever says no may be gone, and its memory with it.
Status PeerDispatch::push_records(const Batch& batch, const Spans& s, const DispatchSide& side, void* stream) {
  PushRecords push;
  push.link = link_;
  push.records = record_region_;
  push.record_stride = max_tokens_;
  push.record = record_;
  const auto arrays =
      wire_arrays(side.buffers.routed.hidden, layer_.config()->activation_format, layer_.config()->hidden_size);
  std::copy(arrays.begin(), arrays.end(), push.arrays);
  push.slots = s.slots;
  push.weights = batch.topk_weights;
  push.first_of_rank = slots_.first_of_rank();
  push.tokens = batch.tokens;
  return peers_.push_records(layer_.weights().device, push, stream);
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
  return all_capture_or_none(announcement_, world_, 0);
}

Status PeerDispatch::work(const Spans& s, const DispatchSide& owner, void* stream) {
  const int device = layer_.weights().device;
  const LayerSteps& steps = *layer_.backend().steps;
  TakeRecords take;
  take.layout = RecordLayout(record_, world_, max_tokens_, false);
  take.messages = record_region_.of_rank[rank_];
  take.range = layer_.weights().range;
  take.ids = s.ids;
  take.weights = s.weights;
  take.peers.record_stride = max_tokens_;
  for (int home = 0; home < world_; ++home)
    take.peers.first_of_home[home + 1] =
        take.peers.first_of_home[home] + static_cast<int32_t>(announcement_.tokens(home));
  take.failed = s.failed;
  take.report = report_.on_device();
  const StepContext step = owner.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(records_.take(step, take));
  NVFP4_MOE_TRY(steps.route(step));
  NVFP4_MOE_TRY(multiply(steps, step, owner.buffers.routed));
  PushRows push;
  push.link = link_;
  push.rows = row_region_;
  push.record = record_;
  push.rows_out = owner.buffers.routed.rows_out;
  push.row_of_assignment = owner.buffers.row_of_assignment;
  push.ids = s.ids;
  push.records = owner.batch.tokens;
  push.messages = take.peers;
  return peers_.push_rows(device, push, stream);
}

Status PeerDispatch::run(Exchange&, const Batch& batch, std::byte* workspace, void* stream) {
  const int device = layer_.weights().device;
  const LayerSteps& steps = *layer_.backend().steps;
  const Spans s = spans(workspace, batch.tokens);
  const DispatchSide at_home = home(s, batch), at_owner = owner(s);
  const bool works = at_owner.batch.tokens > 0, shares = batch.tokens > 0 && at_home.buffers.shared.experts > 0;
  const auto enqueue = [&]() -> Status {
    NVFP4_MOE_TRY(push_records(batch, s, at_home, stream));
    NVFP4_MOE_TRY(peers_.meet(device, link_, PeerMeeting::kBoth, true, s.failed, stream));
    if (works) NVFP4_MOE_TRY(work(s, at_owner, stream));
    const StepContext step = at_home.step(layer_.weights(), stream);
    if (shares) {
      NVFP4_MOE_TRY(peers_.meet(device, link_, PeerMeeting::kArrive, false, s.failed, stream));
      NVFP4_MOE_TRY(multiply(steps, step, at_home.buffers.shared));
    }
    NVFP4_MOE_TRY(
        peers_.meet(device, link_, shares ? PeerMeeting::kWait : PeerMeeting::kBoth, false, s.failed, stream));
    if (batch.tokens > 0) NVFP4_MOE_TRY(steps.combine(step));
    ConcludeRun conclude;
    conclude.status = s.status;
    conclude.home = at_home.buffers.status;
    conclude.owner = works ? at_owner.buffers.status : nullptr;
    conclude.failed = s.failed;
    conclude.out = batch.out;
    conclude.out_dtype = batch.out_dtype;
    conclude.count = batch.tokens * layer_.config()->hidden_size;
    return records_.conclude(device, conclude, stream);
  };
  return on_device_of(layer_, enqueue);
}

Status PeerDispatch::report(void* stream) const {
  NVFP4_MOE_ASSIGN(const WireReport seen, report_.take(layer_, stream));
  return seen.wrong == 0 ? Status() : DeviceReport::wrong_records(rank_, seen.wrong);
}

}  // namespace nvfp4_moe
