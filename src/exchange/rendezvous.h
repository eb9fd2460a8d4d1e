// How ranks that are processes find each other.
#pragma once

#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/socket.h"

namespace nvfp4_moe {

// A connection with each other rank of the world: (world) sockets, this rank's not open. All come to rank 0, which
// listens at address and port, and get from it either where each rank listens, or, all alike, why they are no world.
Result<std::vector<Socket>> meet(const std::string& address, int port, int rank, int world, Timeout timeout);

}  // namespace nvfp4_moe
