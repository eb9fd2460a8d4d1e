#include "parallel/device_reduce.h"

#include <algorithm>

#include "core/arena.h"
#include "core/shard.h"
#include "moe/registry.h"

namespace nvfp4_moe {
namespace {

// Up to so many bytes of partial sums every rank gathers them all: one exchange then costs its latency and little more.
constexpr int64_t kGatheredBytes = 1 << 20;

}  // namespace

struct DeviceReduce::Spans {
  RunStatus* status = nullptr;
  uint32_t* failed = nullptr;  // (1) of PeerReduce
  int32_t* slots = nullptr;    // (T, k)
  float* partial = nullptr;    // (T, H) what this rank's experts add
  float* parts = nullptr;      // (world, T, H) of small sums, or (world, a shard)
  std::byte* inner = nullptr;  // this rank's run
  size_t inner_bytes = 0, size_bytes = 0;
};

DeviceReduce::DeviceReduce(const MoeLayer& layer, const DeviceSlots& slots, int world)
    : layer_(layer),
      slots_(slots),
      ranks_(*device_ranks(layer.plan().device.kind)),
      memory_(*layer.backend().memory),
      world_(world),
      send_bytes_(static_cast<size_t>(world)),
      recv_bytes_(static_cast<size_t>(world)) {}

DeviceReduce::Spans DeviceReduce::spans(std::byte* workspace, int64_t tokens) const {
  const int64_t values = tokens * layer_.config()->hidden_size;
  // Grows with the tokens: the most that a small sum takes is enough for the shards that are as large.
  const int64_t gathered = world_ * std::min(values, kGatheredBytes / static_cast<int64_t>(sizeof(float)));
  Arena arena(workspace, layer_.plan().limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.failed = arena.take<uint32_t>("", "failed", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * layer_.config()->top_k);
  spans.partial = arena.take<float>("", "partial", values);
  spans.parts = arena.take<float>("", "parts", peers_ ? 0 : std::max(gathered, values + world_ * Shard::kUnit));
  spans.inner_bytes = layer_.workspace_bytes(tokens);
  spans.inner = arena.take<std::byte>("", "inner", static_cast<int64_t>(spans.inner_bytes));
  spans.size_bytes = arena.size_bytes();
  return spans;
}

size_t DeviceReduce::workspace_bytes(int64_t tokens) const { return spans(nullptr, tokens).size_bytes; }

Status DeviceReduce::connect(PeerMemory& peers, int64_t max_tokens) {
  peers_ = std::make_unique<PeerReduce>(layer_);
  return peers_->connect(peers, max_tokens * layer_.config()->hidden_size);
}

Status DeviceReduce::sum(Exchange& exchange, const Batch& batch, const Spans& spans, void* stream) {
  DeviceTransport& transport = *exchange.device();
  const int rank = exchange.rank();
  const int device = layer_.weights().device;
  const int64_t count = batch.tokens * layer_.config()->hidden_size;
  NVFP4_MOE_ASSIGN(const uint64_t capture, memory_.capture_id(stream));
  const bool captured = capture != 0;
  if (count * static_cast<int64_t>(sizeof(float)) <= kGatheredBytes) {
    std::fill(recv_bytes_.begin(), recv_bytes_.end(), count * static_cast<int64_t>(sizeof(float)));
    NVFP4_MOE_TRY(transport.all_gather(spans.partial, recv_bytes_.data(), spans.parts, stream, captured));
    return ranks_.sum_of_ranks(device, {spans.parts, world_, count, batch.out, batch.out_dtype}, stream);
  }
  const Shard mine = Shard::of(count, rank, world_);
  const int64_t width = bits(batch.out_dtype) / 8;
  for (int r = 0; r < world_; ++r) {
    send_bytes_[static_cast<size_t>(r)] = Shard::of(count, r, world_).count() * static_cast<int64_t>(sizeof(float));
    recv_bytes_[static_cast<size_t>(r)] = mine.count() * static_cast<int64_t>(sizeof(float));
  }
  const AllToAll shards{"all_reduce",       reinterpret_cast<const std::byte*>(spans.partial),
                        send_bytes_.data(), reinterpret_cast<std::byte*>(spans.parts),
                        recv_bytes_.data(), exchange.timeout()};
  NVFP4_MOE_TRY(transport.all_to_all_v(shards, stream, captured));
  auto* const own = static_cast<std::byte*>(batch.out) + mine.first * width;
  NVFP4_MOE_TRY(ranks_.sum_of_ranks(device, {spans.parts, world_, mine.count(), own, batch.out_dtype}, stream));
  for (int r = 0; r < world_; ++r) recv_bytes_[static_cast<size_t>(r)] = Shard::of(count, r, world_).count() * width;
  return transport.all_gather(own, recv_bytes_.data(), batch.out, stream, captured);
}

Status DeviceReduce::run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream) {
  const Spans s = spans(workspace, batch.tokens);
  const MoeConfig& config = layer_.config();
  const int device = layer_.weights().device;
  // All ranks see the same tokens, and so begin at the same turn.
  NVFP4_MOE_TRY(slots_.enqueue(batch, 0, s.slots, stream));
  Batch mine = batch;
  mine.topk_ids = s.slots;
  mine.ids_dtype = DType::kI32;
  if (config->shared_intermediate_size == 0) mine.shared_weights = nullptr;
  mine.out = s.partial;
  mine.out_dtype = DType::kF32;
  NVFP4_MOE_TRY(layer_.run(mine, s.inner, s.inner_bytes, stream, s.status));
  bool counted = false;
  if (peers_) {
    NVFP4_MOE_ASSIGN(counted, peers_->enqueue(s.partial, batch.tokens * config->hidden_size, batch.out, batch.out_dtype,
                                              &s.status->nonfinite_outputs, s.failed, stream));
  } else {
    NVFP4_MOE_TRY(sum(exchange, batch, s, stream));
  }
  if (counted) return {};
  return ranks_.check_sum(device,
                          {batch.out, batch.out_dtype, batch.tokens * config->hidden_size,
                           peers_ ? nullptr : exchange.device()->failure_word(), &s.status->nonfinite_outputs},
                          stream);
}

}  // namespace nvfp4_moe
