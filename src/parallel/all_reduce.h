// All-reduce: slots, this rank's experts in fp32, the sum over the ranks. The bits of the sum are
// the same over host, NCCL and peer memory: each element is added in fp32 in the order of the ranks
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
    float* partial = nullptr;    // (T, H) what this rank's experts add
    float* parts = nullptr;      // (parts_values)
    std::byte* inner = nullptr;  // a workspace of this rank's own run
    size_t inner_bytes = 0, size_bytes = 0;
  };

  AllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots)
      : RankCombine(layer, ranks), slots_(std::move(slots)), counts_(world(), 0) {}
  Slots& slots() override { return *slots_; }
  Spans spans(std::byte* workspace, int64_t tokens) const;
  // fp32 values of other ranks that a run keeps in its workspace.
  virtual int64_t parts_values(int64_t) const { return 0; }
  // partial of all ranks -> batch.out, and what of it is NaN or Inf -> status.
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

// A small sum is gathered whole by every rank and added there, in one exchange; a large one is
// added shard by shard, and the rounded shards are gathered.
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

// A small sum is one kernel, which sends every value to every rank and adds what it receives. A
// large one is added shard by shard: 6 bytes a value over the link instead of 4 for each other
// rank, and two barriers.
class PeerAllReduce : public AllReduce {
 public:
  // Collective: reserves the memory that the ranks write to.
  static Result<std::unique_ptr<RankCombine>> make(MoeLayer& layer, const Ranks& ranks,
                                                   std::unique_ptr<Slots> slots);
  // Bytes that a rank sends to all others for a sum of that many values, in runs of at most
  // max_values, including flags.
  static int64_t sent_bytes(int64_t count, int64_t max_values, int64_t world, DType out_dtype);

 private:
  PeerAllReduce(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<Slots> slots);
  Status sum(const Batch& batch, const Spans& spans, void* stream) override;

  const DevicePeers& peers_;
  PeerSum sum_;             // what all runs have in common
  int64_t most_small_ = 0;  // values of a small sum
};

}  // namespace nvfp4_moe::internal
