// Ranks that are processes, on one host or several, connected by TCP: host memory, and what GPUs' ranks agree on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/socket.h"

namespace nvfp4_moe {

// Rank 0 listens at address and port, the others come to it and learn from it where each listens; then each pair has a
// connection. Waits for all ranks. A rank that claims another world or a rank that is taken ends all of them with that
// failure; what connects and is no rank is sent away. Nothing is encrypted, and whoever reaches the port may say that it
// is a rank: for loopback and for networks that are a cluster's own.
Result<std::unique_ptr<Exchange>> connect_tcp(const std::string& address, int port, int rank, int world,
                                              Timeout timeout = kExchangeTimeout);

// What an exchange over connections that stand calls: peers as below.
Result<std::unique_ptr<Transport>> make_tcp_transport(std::vector<Socket> peers, int rank);

// Over connections that stand: peers is (world), this rank's not open, none of them blocking.
Result<std::unique_ptr<Exchange>> connect_peers(std::vector<Socket> peers, int rank,
                                                Timeout timeout = kExchangeTimeout);

}  // namespace nvfp4_moe
