// Dispatch: a run of kAllToAll, from a rank's tokens to their experts' ranks and back.
//
//   home:  route, quantize          tokens (T) -> codes and scales, as the GEMM reads them
//   wire:  a record a token and rank: its activations, which of the rank's slots it goes to, with which weights
//   owner: route, gemm1_swiglu, requantize, gemm2 on the tokens of all ranks
//   wire:  a row an assignment, in the order in which the records ask for them
//   home:  rows to where combine looks for them; the shared expert; combine, in the order of k
// All of it is the backend's own steps. Quantizing before the wire gives the bits of quantizing behind it, and rows do
// not depend on what else a GEMM multiplies, so the result is that of one rank with all experts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/device_exchange.h"
#include "backend/layer_steps.h"
#include "exchange/exchange.h"
#include "moe/layer.h"
#include "parallel/message_sizes.h"
#include "parallel/placement.h"

namespace nvfp4_moe {

class Dispatch {
 public:
  // layer: this rank's slots of a config whose experts are all slots; its limits are of world * capacity tokens.
  // capacity: tokens from one rank to another, at most; fixed: every message is as long as such a number can make it.
  Dispatch(const MoeLayer& layer, int world, int64_t capacity, bool fixed);

  size_t workspace_bytes(int64_t tokens) const;
  // Slots of the assignments (T, k), inside the workspace: -1 none, -2 an id that is no expert's. run reads them.
  int32_t* slots(std::byte* workspace) const;
  // Counts what each rank has for each other and tells all. mine: whether this rank can run at all, without which
  // nothing else is looked at. Ok on all ranks or on none.
  Status announce(Exchange& exchange, const Placement& placement, int64_t tokens, const int32_t* slots,
                  const Status& mine);
  // Behind announce, of the same tokens. batch and workspace have been checked.
  Status run(Exchange& exchange, const Placement& placement, const Batch& batch, std::byte* workspace);

 private:
  struct Spans;
  Spans spans(std::byte* workspace, int64_t tokens) const;
  Status send_tokens(Exchange& exchange, const Placement& placement, const LayerBuffers& home, const Batch& batch,
                     const Spans& spans);
  Status take_tokens(int rank, const LayerBuffers& buffers, const Spans& spans) const;
  Status send_rows(Exchange& exchange, const LayerBuffers& owner, const Spans& spans);
  void take_rows(int rank, const Placement& placement, const LayerBuffers& home, int64_t tokens,
                 const Spans& spans) const;

  const MoeLayer& layer_;
  const PackedWeights home_;  // of no expert: config and range, for the steps that read no weights
  const int world_;
  const WireRecord record_;
  const int64_t top_k_;
  MessageSizes sizes_;
  std::vector<int64_t> counts_;                   // (world) pairs of tokens and rows for each rank
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

}  // namespace nvfp4_moe
