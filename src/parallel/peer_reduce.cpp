#include "parallel/peer_reduce.h"

#include <algorithm>

#include "core/scale_layout.h"
#include "core/shard.h"
#include "moe/registry.h"

namespace nvfp4_moe {
namespace {

// What a rank sends of a small sum to all others, marks not counted: beyond it the bytes take longer than two meetings.
constexpr int64_t kSmallBytes = int64_t{1} << 20;

int64_t most_small_of(int64_t max_values, int64_t world) {
  const int64_t others = std::max<int64_t>(world - 1, 1);
  return std::min(max_values, kSmallBytes / 4 / others / Shard::kUnit * Shard::kUnit);
}

}  // namespace

PeerReduce::PeerReduce(const MoeLayer& layer)
    : peers_(*device_peers(layer.plan().device.kind)), device_(layer.weights().device) {}

Status PeerReduce::connect(PeerMemory& peers, int64_t max_values) {
  sum_.link = peers.link();
  const int64_t world = sum_.link.world;
  most_small_ = most_small_of(max_values, world);
  const auto pairs_bytes = [&](int64_t values) { return 2 * world * (values / 2) * int64_t{sizeof(MarkedPair)}; };
  NVFP4_MOE_ASSIGN(const PeerMemory::Region pairs, peers.reserve(PeerRegion::kPairs, pairs_bytes(most_small_)));
  sum_.pairs = pairs.addresses;
  sum_.pair_stride = pairs.size_bytes / pairs_bytes(2);
  if (max_values <= most_small_) return {};
  sum_.part_stride = round_up((max_values + world - 1) / world, Shard::kUnit);
  NVFP4_MOE_ASSIGN(const PeerMemory::Region parts, peers.reserve(PeerRegion::kParts, world * sum_.part_stride * 4));
  NVFP4_MOE_ASSIGN(const PeerMemory::Region totals, peers.reserve(PeerRegion::kTotals, max_values * 4));
  sum_.parts = parts.addresses;
  sum_.totals = totals.addresses;
  return {};
}

int64_t PeerReduce::sent_bytes(int64_t count, int64_t max_values, int64_t world, DType out_dtype) {
  if (count <= most_small_of(max_values, world)) return (world - 1) * count / 2 * int64_t{sizeof(MarkedPair)};
  // The parts that others add, and this rank's shard of the sums to each of them.
  return (world - 1) * count / world * (4 + bits(out_dtype) / 8);
}

Result<bool> PeerReduce::enqueue(const float* partial, int64_t count, void* out, DType out_dtype, uint64_t* nonfinite,
                                 uint32_t* failed, void* stream) const {
  PeerSum sum = sum_;
  sum.partial = partial;
  sum.count = count;
  sum.out = out;
  sum.out_dtype = out_dtype;
  sum.nonfinite = nonfinite;
  sum.failed = failed;
  if (count <= most_small_) {
    NVFP4_MOE_TRY(peers_.sum_small(device_, sum, stream));
    return true;
  }
  NVFP4_MOE_TRY(peers_.push_parts(device_, sum, stream));
  NVFP4_MOE_TRY(peers_.meet(device_, sum.link, true, failed, stream));
  NVFP4_MOE_TRY(peers_.sum_shard(device_, sum, stream));
  NVFP4_MOE_TRY(peers_.meet(device_, sum.link, false, failed, stream));
  NVFP4_MOE_TRY(peers_.take_totals(device_, sum, stream));
  return false;
}

}  // namespace nvfp4_moe
