// Ranks on GPUs of one host whose kernels write directly into other ranks' memory.
//
// The Exchange carries memory handles, the facts that ranks must agree on, and failures that no
// device can detect. Kernels time out by the device's own clock, in a captured graph too. A thread
// watches for timeouts and for ranks that are gone, and then ends all waits.
#pragma once

#include <memory>

#include "core/peer_device.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// Collective. kUnsupported on all ranks if there are more than kMostPeers, if they are on several
// hosts, or if one's device cannot access another's memory. The exchange must outlive the result.
Result<std::unique_ptr<PeerMemory>> connect_peers(Exchange& exchange,
                                                  std::unique_ptr<PeerDevice> device);

}  // namespace nvfp4_moe::internal
