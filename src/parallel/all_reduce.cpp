// All-reduce: translate ids to slots, run this rank's experts in fp32, sum over the ranks. The sum
// has the same bits over host, NCCL and peer memory: each element is added in fp32 in rank order
// and rounded once.
#include <algorithm>
#include <bit>
#include <string>

#include "backend/device_peers.h"
#include "core/arena.h"
#include "core/float_formats.h"
#include "core/scale_layout.h"
#include "core/shard.h"
#include "moe/registry.h"
#include "parallel/exchange_counts.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kF32Bytes{sizeof(float)};

class AllReduce : public RankCombine {
 public:
  size_t workspace_bytes(int64_t tokens) const override {
    return spans(nullptr, tokens).size_bytes;
  }

  Status begin(const Batch& batch, std::byte*, void* stream, Status mine) override {
    bool captured = false;
    if (const auto* const memory = layer_.backend().memory; memory != nullptr && mine.ok()) {
      const Result<uint64_t> capture = memory->capture_id(stream);
      mine = capture.status();
      captured = capture.ok() && *capture != 0;
    }
    NVFP4_MOE_TRY(counts_.gather(exchange(), batch.tokens, mine, captured));
    for (int rank = 1; rank < world(); ++rank)
      if (counts_.tokens(rank) != counts_.tokens(0))
        return invalid_argument("tokens of rank " + std::to_string(rank) + ": expected " +
                                std::to_string(counts_.tokens(0)) + " as on rank 0, got " +
                                std::to_string(counts_.tokens(rank)));
    return {};
  }

  Status run(const Batch& batch, std::byte* workspace, void* stream) override {
    const Spans s = spans(workspace, batch.tokens);
    // All ranks have the same tokens, so all use source rank 0 for turns.
    NVFP4_MOE_TRY(slots_->translate(batch, 0, s.slots, stream));
    Batch mine = batch;
    mine.topk_ids = s.slots;
    mine.ids_dtype = DType::kI32;
    if (layer_.weights().config->shared_intermediate_size == 0) mine.shared_weights = nullptr;
    mine.out = s.partial;
    mine.out_dtype = DType::kF32;
    // on hosts, sum copies it
    RunStatus* const status = layer_.backend().memory == nullptr ? nullptr : s.status;
    NVFP4_MOE_TRY(layer_.run_local(mine, s.inner, s.inner_bytes, stream, status));
    return sum(batch, s, stream);
  }

 protected:
  struct Spans {
    RunStatus* status = nullptr;
    uint32_t* failed = nullptr;  // (1) on devices
    int32_t* slots = nullptr;    // (T, k)
    float* partial = nullptr;    // (T, H) contribution of this rank's experts
    float* parts = nullptr;      // (parts_values) other ranks' values
    std::byte* inner = nullptr;  // workspace of this rank's own run
    size_t inner_bytes = 0, size_bytes = 0;
  };

  AllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
      : RankCombine(layer, ranks), slots_(std::move(slots)), counts_(world(), 0) {}
  Slots& slots() override { return *slots_; }
  int device() const { return layer_.weights().device; }
  int64_t values(int64_t tokens) const { return tokens * config()->hidden_size; }

  Spans spans(std::byte* workspace, int64_t tokens) const {
    Arena arena(workspace, layer_.plan().limits.guard_bytes);
    Spans spans;
    spans.status = arena.take<RunStatus>("", "status", 1);
    spans.failed = arena.take<uint32_t>("", "failed", 1);
    spans.slots = arena.take<int32_t>("", "slots", tokens * top_k());
    spans.partial = arena.take<float>("", "partial", values(tokens));
    spans.parts = arena.take<float>("", "parts", parts_values(tokens));
    spans.inner_bytes = layer_.local_workspace_bytes(tokens);
    spans.inner = arena.take<std::byte>("", "inner", static_cast<int64_t>(spans.inner_bytes));
    spans.size_bytes = arena.size_bytes();
    return spans;
  }
  virtual int64_t parts_values(int64_t) const { return 0; }
  // partial of all ranks -> batch.out; its count of NaN and Inf -> status.
  virtual Status sum(const Batch& batch, const Spans& spans, void* stream) = 0;

 private:
  const std::unique_ptr<Slots> slots_;
  ExchangeCounts counts_;
};

class HostAllReduce : public AllReduce {
 public:
  HostAllReduce(MoeLayer& layer, const Ranks& ranks)
      : AllReduce(layer, ranks, std::make_unique<HostSlots>(ranks.placement, ranks.config->top_k)) {
  }

 private:
  Status sum(const Batch& batch, const Spans& s, void*) override {
    const int64_t count = values(batch.tokens);
    NVFP4_MOE_TRY(exchange().all_reduce(s.partial, count));
    *s.status = *reinterpret_cast<const RunStatus*>(s.inner);
    uint64_t nonfinite = 0;  // NaN or Inf as stored
    const uint32_t overflow = overflow_bits(batch.out_dtype);
    for (int64_t i = 0; i < count; ++i) {
      const float value = s.partial[i];
      nonfinite += (std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu) >= overflow;
      if (batch.out_dtype == DType::kF32)
        static_cast<float*>(batch.out)[i] = value;
      else
        static_cast<uint16_t*>(batch.out)[i] =
            batch.out_dtype == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
    }
    s.status->nonfinite_outputs = nonfinite;
    return {};
  }
};

// Over NCCL. A small sum is gathered by every rank and added locally, in one exchange. A large one
// is added shard by shard, and the rounded shards are gathered.
class DeviceAllReduce : public AllReduce {
 public:
  DeviceAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
      : AllReduce(layer, ranks, std::move(slots)),
        device_(*device_ranks(layer.plan().device.kind)),
        send_bytes_(static_cast<size_t>(world())),
        recv_bytes_(static_cast<size_t>(world())) {}

 private:
  // Such an exchange costs little more than its latency.
  static constexpr int64_t kGatheredBytes = 1 << 20;

  // Grows with the tokens: a larger sum keeps at least the space of the largest small sum.
  int64_t parts_values(int64_t tokens) const override {
    const int64_t count = values(tokens);
    return std::max(world() * std::min(count, kGatheredBytes / kF32Bytes),
                    count + world() * Shard::kUnit);
  }

  Status sum(const Batch& batch, const Spans& s, void* stream) override {
    DeviceTransport& transport = *exchange().device();
    const int64_t count = values(batch.tokens), width = bits(batch.out_dtype) / 8;
    NVFP4_MOE_ASSIGN(const uint64_t capture, layer_.backend().memory->capture_id(stream));
    const bool captured = capture != 0;
    if (count * kF32Bytes <= kGatheredBytes) {
      std::fill(recv_bytes_.begin(), recv_bytes_.end(), count * kF32Bytes);
      NVFP4_MOE_TRY(transport.all_gather(s.partial, recv_bytes_.data(), s.parts, stream, captured));
      const SumOfRanks call{s.parts, world(), count, batch.out, batch.out_dtype};
      NVFP4_MOE_TRY(device_.sum_of_ranks(device(), call, stream));
    } else {
      const Shard mine = Shard::of(count, rank(), world());
      for (int r = 0; r < world(); ++r) {
        send_bytes_[static_cast<size_t>(r)] = Shard::of(count, r, world()).count() * kF32Bytes;
        recv_bytes_[static_cast<size_t>(r)] = mine.count() * kF32Bytes;
      }
      const AllToAll shards{"all_reduce",       reinterpret_cast<const std::byte*>(s.partial),
                            send_bytes_.data(), reinterpret_cast<std::byte*>(s.parts),
                            recv_bytes_.data(), exchange().timeout()};
      NVFP4_MOE_TRY(transport.all_to_all_v(shards, stream, captured));
      auto* const own = static_cast<std::byte*>(batch.out) + mine.first * width;
      const SumOfRanks call{s.parts, world(), mine.count(), own, batch.out_dtype};
      NVFP4_MOE_TRY(device_.sum_of_ranks(device(), call, stream));
      for (int r = 0; r < world(); ++r)
        recv_bytes_[static_cast<size_t>(r)] = Shard::of(count, r, world()).count() * width;
      NVFP4_MOE_TRY(transport.all_gather(own, recv_bytes_.data(), batch.out, stream, captured));
    }
    const CheckReduced check{batch.out, batch.out_dtype, count, transport.failure_word(),
                             &s.status->nonfinite_outputs};
    return device_.check_reduced(device(), check, stream);
  }

  const DeviceRanks& device_;
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

// The most values of a small sum over peer memory: bytes that a rank sends to all others, without
// flags. Above it the transfer takes longer than two barriers.
int64_t most_small_of(int64_t max_values, int64_t world) {
  constexpr int64_t kSmallBytes = int64_t{1} << 20;
  const int64_t others = std::max<int64_t>(world - 1, 1);
  return std::min(max_values, kSmallBytes / kF32Bytes / others / Shard::kUnit * Shard::kUnit);
}

// A small sum is one kernel that sends every value to every rank and adds what it receives. A large
// one is added shard by shard. That sends 6 bytes per value instead of 4 for each other rank, and
// needs two barriers.
class PeerAllReduce : public AllReduce {
 public:
  PeerAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
      : AllReduce(layer, ranks, std::move(slots)),
        peers_(*device_peers(layer.plan().device.kind)) {}

  Status reserve() override {
    PeerMemory& memory = *exchange().peers();
    sum_.link = memory.link();
    const int64_t max_values = values(max_tokens());
    most_small_ = most_small_of(max_values, world());
    const auto pairs_bytes = [&](int64_t values) {
      return 2 * world() * (values / 2) * int64_t{sizeof(PairWithFlags)};
    };
    NVFP4_MOE_ASSIGN(const PeerMemory::Region pairs,
                     memory.reserve(PeerRegion::kPairs, pairs_bytes(most_small_)));
    sum_.pairs = pairs.addresses;
    sum_.pair_stride = pairs.size_bytes / pairs_bytes(2);
    if (max_values <= most_small_) return {};
    sum_.part_stride = round_up((max_values + world() - 1) / world(), Shard::kUnit);
    NVFP4_MOE_ASSIGN(const PeerMemory::Region parts,
                     memory.reserve(PeerRegion::kParts, world() * sum_.part_stride * kF32Bytes));
    NVFP4_MOE_ASSIGN(const PeerMemory::Region totals,
                     memory.reserve(PeerRegion::kTotals, max_values * kF32Bytes));
    sum_.parts = parts.addresses;
    sum_.totals = totals.addresses;
    return {};
  }

 private:
  Status sum(const Batch& batch, const Spans& s, void* stream) override {
    PeerSum sum = sum_;
    sum.partial = s.partial;
    sum.count = values(batch.tokens);
    sum.out = batch.out;
    sum.out_dtype = batch.out_dtype;
    sum.nonfinite = &s.status->nonfinite_outputs;
    sum.failed = s.failed;
    if (sum.count <= most_small_) return peers_.sum_small(device(), sum, stream);
    NVFP4_MOE_TRY(peers_.sum_large(device(), sum, stream));
    return device_ranks(layer_.plan().device.kind)
        ->check_reduced(device(), {batch.out, batch.out_dtype, sum.count, nullptr, sum.nonfinite},
                        stream);
  }

  const DevicePeers& peers_;
  PeerSum sum_;             // fields that all runs share
  int64_t most_small_ = 0;  // maximum number of values of a small sum
};

}  // namespace

int64_t bytes_of_peer_sum(int64_t count, int64_t max_values, int64_t world, DType out_dtype) {
  if (count <= most_small_of(max_values, world))
    return (world - 1) * count / 2 * int64_t{sizeof(PairWithFlags)};
  // The parts that the others add, plus this rank's shard of the totals for each of them.
  return (world - 1) * count / world * (4 + bits(out_dtype) / 8);
}

Result<std::unique_ptr<RankCombine>> make_all_reduce(MoeLayer& layer, const Ranks& ranks) {
  using Made = std::unique_ptr<RankCombine>;
  if (layer.backend().memory == nullptr) return Made(std::make_unique<HostAllReduce>(layer, ranks));
  NVFP4_MOE_ASSIGN(auto slots, DeviceSlots::make(layer, ranks.placement));
  if (ranks.exchange->peers() == nullptr)
    return Made(std::make_unique<DeviceAllReduce>(layer, ranks, std::move(slots)));
  return Made(std::make_unique<PeerAllReduce>(layer, ranks, std::move(slots)));
}

}  // namespace nvfp4_moe::internal
