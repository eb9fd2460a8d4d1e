#include "parallel/device_all_to_all.h"

#include <algorithm>

namespace nvfp4_moe::internal {

DeviceAllToAll::DeviceAllToAll(MoeLayer& layer, const Ranks& ranks,
                               std::unique_ptr<DeviceSlots> slots, DeviceReport report)
    : AllToAllOnDevice(layer, ranks, std::move(slots), std::move(report)),
      counts_(world(), ranks.capacity, ranks.fixed, top_k()),
      mine_(2 * static_cast<size_t>(world())),
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
        "the "
        "host waits for, got one that is");
  NVFP4_MOE_TRY(slots_->translate(batch, rank(), s.slots, stream));
  const CountPackets counted{s.slots, slots_->first_of_rank(), batch.tokens, top_k(), world(),
                             s.counts};
  NVFP4_MOE_TRY(packet_steps_.count(device(), counted, stream));
  int64_t packets = counts_.sent(batch.tokens);
  if (!counts_.fixed()) {
    NVFP4_MOE_TRY(layer_.backend().memory->to_host(device(), mine_.data(), s.counts,
                                                   mine_.size() * sizeof(int64_t), stream));
    packets = 0;
    for (size_t at = 0; at < mine_.size(); at += 2) packets += mine_[at];
  }
  const Side side = source(s, batch);
  const StepContext step = side.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(steps().route(step));  // its rows are not used: it clears status and counters
  const MessageLayout layout = layout_of(batch.tokens);
  NVFP4_MOE_TRY(packet_steps_.scan(
      device(), {layout, counted, s.sources, side.buffers.row_of_assignment, s.send, s.failed},
      stream));
  NVFP4_MOE_TRY(steps().quantize(step));
  PackPackets pack;
  set_tokens(pack, s, side);
  pack.layout = layout;
  pack.sources = s.sources;
  pack.packets = packets;
  pack.messages = s.send;
  return packet_steps_.pack(device(), pack, stream);
}

Status DeviceAllToAll::gather(int64_t tokens, const Status& mine, bool captured) {
  captured_ = captured;
  if (!mine.ok() || counts_.fixed()) std::fill(mine_.begin(), mine_.end(), 0);
  return counts_.gather(exchange(), tokens, mine, captured, mine_);
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
  TakePackets take = take_call(
      s, layout_of(0), s.recv);  // an expert rank's messages have their source ranks' lengths
  take.first_rows = s.first_rows;
  auto* const packets = bounds_.data();
  auto* const rows = packets + world() + 1;
  for (int r = 0; r < world(); ++r) {
    packets[r + 1] = packets[r] + static_cast<int32_t>(counts_.packets_between(r, rank()));
    rows[r + 1] = rows[r] + static_cast<int32_t>(counts_.rows_back_between(r, rank()));
  }
  take.bounds = s.bounds;
  take.capacity = counts_.capacity();
  NVFP4_MOE_TRY(packet_steps_.put(device(), bounds_.data(), static_cast<int64_t>(bounds_.size()),
                                  s.bounds, stream));
  const StepContext step = expert.step(layer_.weights(), stream);
  NVFP4_MOE_TRY(packet_steps_.take(step, steps(), take));
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

}  // namespace nvfp4_moe::internal
