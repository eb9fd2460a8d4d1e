// All-to-all on devices: the code that DeviceAllToAll (over NCCL) and PeerAllToAll (over memory
// that all ranks can access) share.
//
//   source rank   ids to slots; route, quantize                     tokens (T) -> codes and scales
//   dispatch      packets of this rank's tokens to their expert ranks
//   expert rank   unpack, route, gemm1_swiglu, requantize, gemm2      packets (U) -> rows
//   combine       rows back; on the source rank the shared expert, and combine in the order of k
//
// The steps are the backend's own, so the bits are those of one rank with all experts. Rows arrive
// at the address from which combine reads them, and are not copied again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device_exchange.h"
#include "backend/device_peers.h"
#include "backend/layer_steps.h"
#include "core/arena.h"
#include "parallel/exchange_counts.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {

class AllToAllOnDevice : public RankCombine {
 public:
  size_t workspace_bytes(int64_t tokens) const override {
    return spans(nullptr, tokens).size_bytes;
  }
  Status begin(const Batch& batch, std::byte* workspace, void* stream, Status mine) override;
  Status run(const Batch& batch, std::byte* workspace, void* stream) override;
  Status report(void* stream) override;

 protected:
  // T: tokens of this rank. U: the most tokens that all ranks send to this one.
  struct Spans {
    RunStatus* status = nullptr;  // of the source rank
    uint32_t* failed = nullptr;   // (1) why out is NaN; 0: no failure
    int32_t* slots = nullptr;     // (T, k)
    int32_t* ids = nullptr;       // (U, k) slots of this rank
    float* weights = nullptr;     // (U, k)
    std::byte* source = nullptr;  // workspace of T tokens
    std::byte* expert = nullptr;  // workspace of U tokens
    // Only DeviceAllToAll:
    int64_t* counts = nullptr;        // (world, 2)
    int32_t* bounds = nullptr;        // (2, world + 1)
    PacketSource* sources = nullptr;  // sources of the packets to send
    std::byte* send = nullptr;        // packets for all ranks
    std::byte* recv = nullptr;        // (U) packets
    int32_t* first_rows = nullptr;    // (U)
    std::byte* send_rows = nullptr;   // (U k) rows, for the ranks that requested them
    std::byte* recv_rows = nullptr;   // under a capacity; otherwise the source's rows_out
    size_t size_bytes = 0;
  };
  // This rank as the source of its tokens, or as the expert rank of packets.
  struct Side {
    Batch batch;
    Arena arena;
    LayerBuffers buffers;
    const RunPlan* plan;
    StepContext step(const PackedWeights& weights, void* stream,
                     const AwaitedRows* awaited = nullptr) const {
      return {weights, batch, buffers, serial_executor(), arena, stream, plan, awaited};
    }
  };

  AllToAllOnDevice(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<DeviceSlots> slots,
                   Buffer report);
  Slots& slots() override { return *slots_; }
  Spans spans(std::byte* workspace, int64_t tokens) const;
  Side source(const Spans& spans, const Batch& batch);
  // The UnpackPackets call of the expert rank, without the fields of its transport.
  UnpackPackets take_call(const Spans& spans, const MessageLayout& layout,
                          const std::byte* packets) const;
  TokensToSend tokens_of(const Spans& spans, const Side& source) const;
  const LayerSteps& steps() const { return *layer_.backend().steps; }
  int device() const { return layer_.weights().device; }

  virtual void take_more(Spans&, int64_t, Arena&) const {}
  virtual int64_t received() const = 0;  // packets that this rank has room for
  virtual int64_t packets() const = 0;   // packets that it receives in the current run
  // Destination of the rows that come back; null: the source's own rows_out.
  virtual void* rows_out(const Spans& spans) const = 0;
  // The part of a run that needs no other rank. captured: whether the stream is capturing.
  virtual Status prepare(const Batch& batch, const Spans& spans, bool captured, void* stream) = 0;
  // If mine failed, nothing was prepared.
  virtual Status gather(int64_t tokens, const Status& mine, bool captured) = 0;
  virtual Status dispatch(const Batch& batch, const Spans& spans, const Side& source,
                          void* stream) = 0;
  // Runs the expert rank's steps and sends its rows back to their source ranks.
  virtual Status work(const Spans& spans, const StepContext& source, const Side& expert,
                      void* stream) = 0;
  virtual void await(AwaitedRows& awaited, const Spans& spans) const = 0;

  const std::unique_ptr<DeviceSlots> slots_;
  const DevicePackets& packet_steps_;
  const PacketFormat packet_;
  const Buffer report_;  // WireReport

 private:
  // The plan of single steps, reused while batches have the same shape.
  class LastPlan {
   public:
    const RunPlan* of(const MoeLayer& layer, const Batch& batch);

   private:
    int64_t tokens_ = -1;
    DType hidden_dtype_{};
    bool hidden_aligned_ = false;
    std::shared_ptr<const RunPlan> plan_;
  };
  Side side(const Batch& batch, std::byte* workspace) const;

  LastPlan source_plan_, expert_plan_;
};

// All-to-all over NCCL. Without a capacity a run waits once for the device, to exchange counts, and
// cannot be captured. With a capacity it does not wait: counts travel in message headers. If a rank
// has too many tokens for another, the run gives NaN on every rank and status fails.
class DeviceAllToAll : public AllToAllOnDevice {
 public:
  DeviceAllToAll(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<DeviceSlots> slots,
                 Buffer report);

 private:
  // Layout of the messages of a source rank with this many tokens.
  MessageLayout layout_of(int64_t tokens) const {
    return {packet_, world(), counts_.fixed_packets(tokens), counts_.fixed()};
  }
  void take_more(Spans& spans, int64_t tokens, Arena& arena) const override;
  int64_t received() const override { return counts_.received(); }
  int64_t packets() const override;
  void* rows_out(const Spans& spans) const override {
    return counts_.fixed() ? spans.recv_rows : nullptr;
  }
  Status prepare(const Batch& batch, const Spans& spans, bool captured, void* stream) override;
  Status gather(int64_t tokens, const Status& mine, bool captured) override;
  Status dispatch(const Batch& batch, const Spans& spans, const Side& source,
                  void* stream) override;
  Status work(const Spans& spans, const StepContext& source, const Side& expert,
              void* stream) override;
  void await(AwaitedRows& awaited, const Spans& spans) const override;
  Status run_experts(const Spans& spans, const Side& expert, void* stream);

  PacketCounts counts_;
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
  std::vector<int32_t> bounds_;                   // (2, world + 1) UnpackPackets::bounds
  bool captured_ = false;                         // from begin to run
};

// All-to-all over peer memory. A packet's offset depends only on source rank and token, a row's
// only on token and k. So nothing is counted, everything fits, and a run can be captured. Each
// packet and each row carries a flag, and readers wait only for those.
class PeerAllToAll : public AllToAllOnDevice {
 public:
  PeerAllToAll(MoeLayer& layer, const Ranks& ranks, std::unique_ptr<DeviceSlots> slots,
               Buffer report);
  Status reserve() override;

 private:
  int64_t received() const override { return world() * max_tokens(); }
  int64_t packets() const override;
  void* rows_out(const Spans&) const override { return rows_.of_rank[rank()]; }
  Status prepare(const Batch& batch, const Spans& spans, bool captured, void* stream) override;
  Status gather(int64_t tokens, const Status& mine, bool captured) override;
  Status dispatch(const Batch& batch, const Spans& spans, const Side& source,
                  void* stream) override;
  Status work(const Spans& spans, const StepContext& source, const Side& expert,
              void* stream) override;
  void await(AwaitedRows& awaited, const Spans& spans) const override;

  const DevicePeers& peers_;
  PeerLink link_;
  PeerAddresses packets_, packet_flags_, rows_, row_flags_;  // for each rank
  ExchangeCounts counts_;
};

}  // namespace nvfp4_moe::internal
