#include <string>

#include "moe/registry.h"
#include "parallel/device_all_to_all.h"

namespace nvfp4_moe::internal {

PeerAllToAll::PeerAllToAll(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<DeviceSlots> slots,
                           Buffer report)
    : AllToAllOnDevice(layer, ranks, std::move(slots), std::move(report)),
      peers_(*device_peers(layer.plan().device.kind)),
      link_(exchange().peers()->link()),
      counts_(world(), 0) {}

Status PeerAllToAll::reserve() {
  const auto reserve = [&](PeerRegion region, int64_t size_bytes, PeerAddresses& to) -> Status {
    NVFP4_MOE_ASSIGN(const auto reserved, exchange().peers()->reserve(region, size_bytes));
    to = reserved.addresses;
    return {};
  };
  constexpr int64_t kFlagBytes{sizeof(uint32_t)};
  const int64_t rows = max_tokens() * top_k();
  NVFP4_MOE_TRY(reserve(PeerRegion::kPackets, received() * packet_.bytes, packets_));
  NVFP4_MOE_TRY(reserve(PeerRegion::kPacketFlags, received() * kFlagBytes, packet_flags_));
  NVFP4_MOE_TRY(reserve(PeerRegion::kRows, rows * packet_.row_bytes, rows_));
  return reserve(PeerRegion::kRowFlags, rows * kFlagBytes, row_flags_);
}

int64_t PeerAllToAll::packets() const {
  int64_t packets = 0;
  for (int from = 0; from < world(); ++from) packets += counts_.tokens(from);
  return packets;
}

// Prepares a batch that push_tokens does not take.
Status PeerAllToAll::prepare(const Batch& batch, const Spans& s, bool, void* stream) {
  const Side side = source(s, batch);
  const StepContext step = side.step(layer_.weights(), stream);
  if (peers_.pushes_tokens(step, steps())) return {};
  NVFP4_MOE_TRY(slots_->translate(batch, rank(), s.slots, stream));
  NVFP4_MOE_TRY(steps().route(step));  // its rows are not used: it clears status and counters
  // Must precede quantize, which skips tokens that have no row.
  const AssignRows assign{link_, s.slots, side.buffers.row_of_assignment, batch.tokens * top_k(),
                          s.failed};
  NVFP4_MOE_TRY(peers_.assign_rows(device(), assign, stream));
  return steps().quantize(step);
}

Status PeerAllToAll::gather(int64_t tokens, const Status& mine, bool captured) {
  NVFP4_MOE_TRY(counts_.gather(exchange(), tokens, mine, captured));
  for (int source = 0; source < world(); ++source)
    if (const int64_t sent = counts_.tokens(source);
        sent > max_tokens())  // its packets would not fit
      return io_error("exchange counts of rank " + std::to_string(source) + ": expected at most " +
                      std::to_string(max_tokens()) + " tokens, got " + std::to_string(sent));
  return {};
}

// Called after all ranks have confirmed that they run. If a rank cannot run, its memory may be
// gone.
Status PeerAllToAll::dispatch(const Batch& batch, const Spans& s, const Side& source,
                              void* stream) {
  const StepContext step = source.step(layer_.weights(), stream);
  PushPackets push;
  push.from = tokens_of(s, source);
  push.link = link_;
  push.packets = packets_;
  push.flags = packet_flags_;
  push.packet_stride = max_tokens();
  push.packet = packet_;
  push.tokens = batch.tokens;
  push.failed = s.failed;
  if (!peers_.pushes_tokens(step, steps())) return peers_.push_packets(device(), push, stream);
  return peers_.push_tokens(step, steps(), {slots_->call(batch, rank(), s.slots), push});
}

Status PeerAllToAll::work(const Spans& s, const StepContext& source, const Side& expert,
                          void* stream) {
  UnpackPackets unpack =
      take_call(s, MessageLayout(packet_, world(), max_tokens(), false), packets_.of_rank[rank()]);
  unpack.peers.packet_stride = max_tokens();
  unpack.peers.flags = reinterpret_cast<const uint32_t*>(packet_flags_.of_rank[rank()]);
  for (int from = 0; from < world(); ++from)
    unpack.peers.first_of_source[from + 1] =
        unpack.peers.first_of_source[from] + static_cast<int32_t>(counts_.tokens(from));
  unpack.wait = link_.wait;
  const StepContext step = expert.step(layer_.weights(), stream);
  if (expert.batch.tokens > 0) {
    NVFP4_MOE_TRY(packet_steps_.unpack(step, steps(), unpack));
    NVFP4_MOE_TRY(multiply(steps(), step, expert.buffers.routed));
  }
  PushRows push;
  push.link = link_;
  push.rows = rows_;
  push.flags = row_flags_;
  push.packet = packet_;
  push.rows_out = expert.buffers.routed.rows_out;
  push.row_of_assignment = expert.buffers.row_of_assignment;
  push.ids = s.ids;
  push.packets = expert.batch.tokens;
  push.messages = unpack.peers;
  push.expert_status = expert.batch.tokens > 0 ? expert.buffers.status : nullptr;
  push.counts_tokens = peers_.pushes_tokens(source, steps());
  return peers_.push_rows(source, push);
}

void PeerAllToAll::await(AwaitedRows& awaited, const Spans& s) const {
  awaited.wait = link_.wait;
  awaited.world = world();
  awaited.flags = reinterpret_cast<const uint32_t*>(row_flags_.of_rank[rank()]);
  awaited.slots = s.slots;
  awaited.first_of_rank = slots_->first_of_rank();
}

}  // namespace nvfp4_moe::internal
