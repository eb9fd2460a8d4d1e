// PeerDispatch: a run of kAllToAll on devices that reach each other's memory.
//
//   home:  ids to slots; quantize; each token to the memory of its owners          tokens (T) -> records
//   owner: take and route, gemm1_swiglu, requantize, gemm2; rows to the memory of their homes    records (U) -> rows
//   home:  the shared expert; combine, in the order of k
// A record lies where its home and token say, and a row where its token and k say, so that nothing is counted, everything
// always fits, what goes over the link is what there is, and nobody waits on a host: a run can be captured. For the same
// reason a capacity changes nothing. A record and a row each says by a mark that it has come, and nothing else is waited for.
#pragma once

#include <memory>

#include "backend/device_peers.h"
#include "parallel/announcement.h"
#include "parallel/device_all_to_all.h"
#include "parallel/device_slots.h"
#include "parallel/dispatch_side.h"

namespace nvfp4_moe {

class PeerDispatch : public DeviceAllToAll {
 public:
  // layer: of this rank's slots, for the tokens of all ranks. max_tokens: of one rank.
  static Result<std::unique_ptr<PeerDispatch>> make(const MoeLayer& layer, const DeviceSlots& slots, int rank,
                                                    int world, int64_t max_tokens);
  // Collective: the memory that the ranks write to.
  Status connect(PeerMemory& peers);

  size_t workspace_bytes(int64_t tokens) const override;
  Status begin(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream, Status mine) override;
  Status run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream) override;
  Status report(void* stream) const override;

 private:
  struct Spans;
  PeerDispatch(const MoeLayer& layer, const DeviceSlots& slots, int rank, int world, int64_t max_tokens);
  Spans spans(std::byte* workspace, int64_t tokens) const;
  DispatchSide home(const Spans& spans, const Batch& batch);
  DispatchSide owner(const Spans& spans);
  PushRecords records_of(const Spans& spans, const DispatchSide& home) const;
  Status prepare(const Batch& batch, const Spans& spans, void* stream);
  Status push_records(const Batch& batch, const Spans& spans, const DispatchSide& home, void* stream);
  Status work(const Spans& spans, const StepContext& home, const DispatchSide& owner, void* stream);

  const MoeLayer& layer_;
  const DeviceSlots& slots_;
  const DeviceRecords& records_;
  const DevicePeers& peers_;
  const DeviceMemory& memory_;
  const int rank_, world_;
  const int64_t max_tokens_;
  const WireRecord record_;
  DeviceReport report_;
  PeerLink link_;
  PeerAddresses record_region_, record_mark_region_, row_region_, row_mark_region_;
  Announcement announcement_;  // and whether a rank captures
  DispatchSides sides_;
};

}  // namespace nvfp4_moe
