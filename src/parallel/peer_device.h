// A device's memory, as exchange/peers.h shares it, by a backend's functions.
#pragma once

#include <memory>

#include "exchange/peers.h"
#include "moe/registry.h"

namespace nvfp4_moe {

// facts: of a device of which device_peers and device_memory know.
std::unique_ptr<PeerDevice> make_peer_device(const DeviceFacts& facts);

}  // namespace nvfp4_moe
