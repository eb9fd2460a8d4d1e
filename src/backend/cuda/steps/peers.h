// The kernels of DevicePeers, whose table peers.cpp has.
#pragma once

#include "backend/device_peers.h"

namespace nvfp4_moe::cuda {

Status meet(int device, const PeerLink& link, PeerMeeting part, bool first, uint32_t* failed, void* stream);
Status assign_rows(int device, const int32_t* slots, int64_t assignments, int32_t* row_of_assignment, void* stream);
Status push_records(int device, const PushRecords& call, void* stream);
Status push_rows(int device, const PushRows& call, void* stream);
Status sum_small(int device, const PeerSum& call, void* stream);
Status push_parts(int device, const PeerSum& call, void* stream);
Status sum_shard(int device, const PeerSum& call, void* stream);
Status take_totals(int device, const PeerSum& call, void* stream);

}  // namespace nvfp4_moe::cuda
