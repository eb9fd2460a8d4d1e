// DeviceDispatch: a run of kAllToAll on a device, dispatch.h's with the wire between devices.
//
//   home:  ids to slots, counts; route; a scan; quantize, pack                  tokens (T) -> records
//   wire:  records of this rank's tokens to their owners
//   owner: take, route, gemm1_swiglu, requantize, gemm2, pack                 records (U) -> rows
//   wire:  the rows back
//   home:  the shared expert; combine, in the order of k
// The steps are the backend's own and single, so that the bits are those of one rank with all experts. Rows come back to
// where combine reads them: only row_of_assignment says so, and nothing is copied.
//
// Without a capacity a run waits once for the device, for the counts that ranks tell each other, and cannot be captured.
// Under a capacity it waits for nothing: how long messages are depends on how many tokens their home has, and not on the
// routing; counts travel in their headers, and a run in which a rank had too many tokens for another gives NaN on every rank
// and a failure of status.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device_exchange.h"
#include "backend/layer_steps.h"
#include "exchange/exchange.h"
#include "moe/layer.h"
#include "parallel/device_all_to_all.h"
#include "parallel/device_slots.h"
#include "parallel/dispatch_side.h"
#include "parallel/message_sizes.h"

namespace nvfp4_moe {

class DeviceDispatch : public DeviceAllToAll {
 public:
  // layer, capacity, fixed: as for Dispatch.
  static Result<std::unique_ptr<DeviceDispatch>> make(const MoeLayer& layer, const DeviceSlots& slots, int rank,
                                                      int world, int64_t capacity, bool fixed);

  size_t workspace_bytes(int64_t tokens) const override;
  Status begin(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream, Status mine) override;
  Status run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream) override;
  Status report(void* stream) const override;

 private:
  struct Spans;
  DeviceDispatch(const MoeLayer& layer, const DeviceSlots& slots, int rank, int world, int64_t capacity, bool fixed);
  // Of the messages of a home that has so many tokens.
  RecordLayout layout_of(int64_t tokens) const {
    return {record_, world_, sizes_.fixed_records(tokens), sizes_.fixed()};
  }
  Spans spans(std::byte* workspace, int64_t tokens) const;
  DispatchSide home(const Spans& spans, const Batch& batch);
  DispatchSide owner(const Spans& spans);
  Status prepare(const Batch& batch, const Spans& spans, void* stream);
  Status send_records(Exchange& exchange, const Spans& spans, void* stream);
  Status work(const Spans& spans, const DispatchSide& owner, void* stream);
  Status send_rows(Exchange& exchange, const Spans& spans, void* rows, void* stream);

  const MoeLayer& layer_;
  const DeviceSlots& slots_;
  const DeviceRecords& records_;
  const DeviceMemory& memory_;
  const int rank_, world_;
  MessageSizes sizes_;
  const WireRecord record_;
  DeviceReport report_;
  std::vector<int64_t> counts_;                   // (world) pairs of tokens and rows for each rank, and captured
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
  std::vector<int32_t> bounds_;                   // (2, world + 1) TakeRecords::bounds
  DispatchSides sides_;
  bool captured_ = false;  // between begin and run
};

}  // namespace nvfp4_moe
