#include <algorithm>

#include "core/shard.h"
#include "moe/registry.h"
#include "parallel/all_reduce.h"

namespace nvfp4_moe::internal {
namespace {

// Up to this many bytes of partial sums, every rank gathers them all: such an exchange costs little
// more than its latency.
constexpr int64_t kGatheredBytes = 1 << 20;

}  // namespace

DeviceAllReduce::DeviceAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
    : AllReduce(layer, ranks, std::move(slots)),
      device_(*device_ranks(layer.plan().device.kind)),
      send_bytes_(static_cast<size_t>(world())),
      recv_bytes_(static_cast<size_t>(world())) {}

// Grows with the tokens: a larger sum keeps at least the space of the largest small sum.
int64_t DeviceAllReduce::parts_values(int64_t tokens) const {
  const int64_t values = tokens * config()->hidden_size;
  const int64_t gathered =
      world() * std::min(values, kGatheredBytes / static_cast<int64_t>(sizeof(float)));
  return std::max(gathered, values + world() * Shard::kUnit);
}

Status DeviceAllReduce::sum(const Batch& batch, const Spans& s, void* stream) {
  const int device = layer_.weights().device;
  const int64_t count = batch.tokens * config()->hidden_size,
                bytes = count * static_cast<int64_t>(sizeof(float));
  NVFP4_MOE_ASSIGN(const uint64_t capture, layer_.backend().memory->capture_id(stream));
  const bool captured = capture != 0;
  if (bytes <= kGatheredBytes) {
    std::fill(recv_bytes_.begin(), recv_bytes_.end(), bytes);
    NVFP4_MOE_TRY(
        exchange().device()->all_gather(s.partial, recv_bytes_.data(), s.parts, stream, captured));
    NVFP4_MOE_TRY(device_.sum_of_ranks(
        device, {s.parts, world(), count, batch.out, batch.out_dtype}, stream));
  } else {
    NVFP4_MOE_TRY(sum_shards(batch, s, captured, stream));
  }
  return device_.check_sum(device,
                           {batch.out, batch.out_dtype, count, exchange().device()->failure_word(),
                            &s.status->nonfinite_outputs},
                           stream);
}

Status DeviceAllReduce::sum_shards(const Batch& batch, const Spans& s, bool captured,
                                   void* stream) {
  DeviceTransport& transport = *exchange().device();
  const int64_t count = batch.tokens * config()->hidden_size, width = bits(batch.out_dtype) / 8;
  const Shard mine = Shard::of(count, rank(), world());
  for (int r = 0; r < world(); ++r) {
    send_bytes_[static_cast<size_t>(r)] =
        Shard::of(count, r, world()).count() * static_cast<int64_t>(sizeof(float));
    recv_bytes_[static_cast<size_t>(r)] = mine.count() * static_cast<int64_t>(sizeof(float));
  }
  const AllToAll shards{"all_reduce",       reinterpret_cast<const std::byte*>(s.partial),
                        send_bytes_.data(), reinterpret_cast<std::byte*>(s.parts),
                        recv_bytes_.data(), exchange().timeout()};
  NVFP4_MOE_TRY(transport.all_to_all_v(shards, stream, captured));
  auto* const own = static_cast<std::byte*>(batch.out) + mine.first * width;
  const SumOfRanks call{s.parts, world(), mine.count(), own, batch.out_dtype};
  NVFP4_MOE_TRY(device_.sum_of_ranks(layer_.weights().device, call, stream));
  for (int r = 0; r < world(); ++r)
    recv_bytes_[static_cast<size_t>(r)] = Shard::of(count, r, world()).count() * width;
  return transport.all_gather(own, recv_bytes_.data(), batch.out, stream, captured);
}

}  // namespace nvfp4_moe::internal
