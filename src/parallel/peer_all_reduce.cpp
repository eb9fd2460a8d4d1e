#include <algorithm>

#include "core/scale_layout.h"
#include "core/shard.h"
#include "moe/registry.h"
#include "parallel/all_reduce.h"

namespace nvfp4_moe::internal {
namespace {

// Limit for a small sum: bytes that a rank sends to all others, without flags. Above it the
// transfer takes longer than two barriers.
constexpr int64_t kSmallBytes = int64_t{1} << 20;

int64_t most_small_of(int64_t max_values, int64_t world) {
  const int64_t others = std::max<int64_t>(world - 1, 1);
  return std::min(max_values, kSmallBytes / 4 / others / Shard::kUnit * Shard::kUnit);
}

}  // namespace

PeerAllReduce::PeerAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
    : AllReduce(layer, ranks, std::move(slots)), peers_(*device_peers(layer.plan().device.kind)) {}

Result<std::unique_ptr<RankCombine>> PeerAllReduce::make(MoeLayer& layer, const Ranks& ranks,
                                                         std::unique_ptr<Slots> slots) {
  std::unique_ptr<PeerAllReduce> made(new PeerAllReduce(layer, ranks, std::move(slots)));
  PeerMemory& memory = *ranks.exchange->peers();
  PeerSum& sum = made->sum_;
  sum.link = memory.link();
  const int64_t world = sum.link.world, max_values = ranks.max_tokens * ranks.config->hidden_size;
  made->most_small_ = most_small_of(max_values, world);
  const auto pairs_bytes = [&](int64_t values) {
    return 2 * world * (values / 2) * int64_t{sizeof(PairWithFlags)};
  };
  NVFP4_MOE_ASSIGN(const PeerMemory::Region pairs,
                   memory.reserve(PeerRegion::kPairs, pairs_bytes(made->most_small_)));
  sum.pairs = pairs.addresses;
  sum.pair_stride = pairs.size_bytes / pairs_bytes(2);
  if (max_values > made->most_small_) {
    sum.part_stride = round_up((max_values + world - 1) / world, Shard::kUnit);
    NVFP4_MOE_ASSIGN(const PeerMemory::Region parts,
                     memory.reserve(PeerRegion::kParts, world * sum.part_stride * 4));
    NVFP4_MOE_ASSIGN(const PeerMemory::Region totals,
                     memory.reserve(PeerRegion::kTotals, max_values * 4));
    sum.parts = parts.addresses;
    sum.totals = totals.addresses;
  }
  return std::unique_ptr<RankCombine>(std::move(made));
}

int64_t PeerAllReduce::sent_bytes(int64_t count, int64_t max_values, int64_t world,
                                  DType out_dtype) {
  if (count <= most_small_of(max_values, world))
    return (world - 1) * count / 2 * int64_t{sizeof(PairWithFlags)};
  // The parts that the others add, plus this rank's shard of the totals for each of them.
  return (world - 1) * count / world * (4 + bits(out_dtype) / 8);
}

Status PeerAllReduce::sum(const Batch& batch, const Spans& s, void* stream) {
  const int device = layer_.weights().device;
  PeerSum sum = sum_;
  sum.partial = s.partial;
  sum.count = batch.tokens * config()->hidden_size;
  sum.out = batch.out;
  sum.out_dtype = batch.out_dtype;
  sum.nonfinite = &s.status->nonfinite_outputs;
  sum.failed = s.failed;
  if (sum.count <= most_small_) return peers_.sum_small(device, sum, stream);
  NVFP4_MOE_TRY(peers_.push_parts(device, sum, stream));
  NVFP4_MOE_TRY(peers_.barrier(device, sum.link, true, s.failed, stream));
  NVFP4_MOE_TRY(peers_.sum_shard(device, sum, stream));
  NVFP4_MOE_TRY(peers_.barrier(device, sum.link, false, s.failed, stream));
  NVFP4_MOE_TRY(peers_.take_totals(device, sum, stream));
  return device_ranks(layer_.plan().device.kind)
      ->check_sum(device, {batch.out, batch.out_dtype, sum.count, nullptr, sum.nonfinite}, stream);
}

}  // namespace nvfp4_moe::internal
