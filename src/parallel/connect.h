// Connects the devices of an exchange's ranks. Call it before the first layer on GPUs opens over
// the exchange.
#pragma once

#include <string>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// Gives the exchange NCCL between devices; `device` ("cuda:1") is this rank's. Collective. library
// and communicator: exchange/nccl.h.
Status use_nccl(Exchange& exchange, const std::string& device, const std::string& library = "",
                void* communicator = nullptr);

// Gives the exchange peer memory between devices instead of NCCL; `device` is this rank's. For GPUs
// of one host that can access each other's memory. Collective; kUnsupported on all ranks if one
// cannot (exchange/peers.h). Runs of layers over it must be ordered on each rank's device, by one
// stream or by events.
Status use_peers(Exchange& exchange, const std::string& device);

}  // namespace nvfp4_moe::internal
