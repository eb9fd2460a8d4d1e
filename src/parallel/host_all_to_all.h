// HostAllToAll: a run of kAllToAll on hosts, from a rank's tokens to their expert ranks and back.
//
//   source rank   route, quantize          tokens (T) -> codes and scales, as the GEMM reads them
//   dispatch      a packet for each token and rank: activations, the slots that it goes to on that
//                 rank, and weights
//   expert rank   route, gemm1_swiglu, requantize, gemm2 on the tokens of all ranks
//   combine       a row for each assignment, in the order in which the packets request them
//   source rank   rows to the arrays of combine; the shared expert; combine, in the order of k
//
// All steps are the backend's own. Quantizing on the source rank gives the same bits as quantizing
// on the expert rank, and a row does not depend on the other rows of a GEMM. So the result equals
// that of one rank with all experts.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/device_exchange.h"
#include "backend/layer_steps.h"
#include "parallel/exchange_counts.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {

class HostAllToAll : public RankCombine {
 public:
  HostAllToAll(MoeLayer& layer, const Ranks& ranks);

  size_t workspace_bytes(int64_t tokens) const override;
  Status begin(const Batch& batch, std::byte* workspace, void* stream, Status mine) override;
  Status run(const Batch& batch, std::byte* workspace, void* stream) override;

 private:
  struct Spans;
  Slots& slots() override { return slots_; }
  Spans spans(std::byte* workspace, int64_t tokens) const;
  Status send_tokens(const LayerBuffers& source, const Batch& batch, const Spans& spans);
  Status take_tokens(const LayerBuffers& expert, const Spans& spans) const;
  Status send_rows(const LayerBuffers& expert, const Spans& spans);
  void take_rows(const LayerBuffers& source, int64_t tokens, const Spans& spans) const;

  const PackedWeights source_;  // without experts: config and range, for steps that read no weights
  const PacketFormat packet_;
  HostSlots slots_;
  PacketCounts counts_;
  std::vector<int64_t> mine_;                     // (world) pairs of tokens and rows for each rank
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

}  // namespace nvfp4_moe::internal
