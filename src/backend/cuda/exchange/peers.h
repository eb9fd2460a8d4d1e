// The functions of DevicePeers that are not in the file of their table (peers.cpp).
#pragma once

#include "backend/device_peers.h"

namespace nvfp4_moe::internal::cuda {

bool pushes_tokens(const StepContext& source, const LayerSteps& steps);
Status push_tokens(const StepContext& source, const LayerSteps& steps, const PushTokens& call);
Status assign_rows(int device, const AssignRows& call, void* stream);
Status push_packets(int device, const PushPackets& call, void* stream);
Status push_rows(const StepContext& source, const PushRows& call);
Status sum_small(int device, const PeerSum& call, void* stream);
Status sum_large(int device, const PeerSum& call, void* stream);

}  // namespace nvfp4_moe::internal::cuda
