// All-reduce: translate ids to slots, run this rank's experts in fp32, sum over the ranks. The sum
// has the same bits over host, NCCL and peer memory: each element is added in fp32 in rank order
// and rounded once.
#pragma once

#include <memory>
#include <vector>

#include "backend/device_exchange.h"
#include "backend/device_peers.h"
#include "parallel/exchange_counts.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {

class AllReduce : public RankCombine {
 public:
  size_t workspace_bytes(int64_t tokens) const override {
    return spans(nullptr, tokens).size_bytes;
  }
  Status begin(const Batch& batch, std::byte* workspace, void* stream, Status mine) override;
  Status run(const Batch& batch, std::byte* workspace, void* stream) override;

 protected:
  struct Spans {
    RunStatus* status = nullptr;
    uint32_t* failed = nullptr;  // (1) on devices
    int32_t* slots = nullptr;    // (T, k)
    float* partial = nullptr;    // (T, H) contribution of this rank's experts
    float* parts = nullptr;      // (parts_values)
    std::byte* inner = nullptr;  // workspace of this rank's own run
    size_t inner_bytes = 0, size_bytes = 0;
  };

  AllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
      : RankCombine(layer, ranks), slots_(std::move(slots)), counts_(world(), 0) {}
  Slots& slots() override { return *slots_; }
  Spans spans(std::byte* workspace, int64_t tokens) const;
  // The number of fp32 values of other ranks that a run keeps in its workspace.
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
  Status sum(const Batch& batch, const Spans& spans, void* stream) override;
};

// A small sum is gathered by every rank and added locally, in one exchange. A large one is added
// shard by shard, and the rounded shards are gathered.
class DeviceAllReduce : public AllReduce {
 public:
  DeviceAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots);

 private:
  int64_t parts_values(int64_t tokens) const override;
  Status sum(const Batch& batch, const Spans& spans, void* stream) override;
  Status sum_shards(const Batch& batch, const Spans& spans, bool captured, void* stream);

  const DeviceRanks& device_;
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

// A small sum is one kernel that sends every value to every rank and adds what it receives. A large
// one is added shard by shard. That sends 6 bytes per value instead of 4 for each other rank, and
// needs two barriers.
class PeerAllReduce : public AllReduce {
 public:
  // Collective: reserves the memory that the ranks write to.
  static Result<std::unique_ptr<RankCombine>> make(MoeLayer& layer, const Ranks& ranks,
                                                   std::unique_ptr<Slots> slots);
  // Bytes that a rank sends to all others for a sum of `count` values, including flags, if runs
  // have at most max_values.
  static int64_t sent_bytes(int64_t count, int64_t max_values, int64_t world, DType out_dtype);

 private:
  PeerAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots);
  Status sum(const Batch& batch, const Spans& spans, void* stream) override;

  const DevicePeers& peers_;
  PeerSum sum_;             // fields that all runs share
  int64_t most_small_ = 0;  // maximum number of values of a small sum
};

}  // namespace nvfp4_moe::internal
