// Connects the devices of an exchange's ranks, before the first layer over it on GPUs.
#pragma once

#include <string>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// Gives the exchange NCCL between devices, this rank's being `device` ("cuda:1"). Collective.
// library and communicator: exchange/nccl.h.
Status use_nccl(Exchange& exchange, const std::string& device, const std::string& library = "",
                void* communicator = nullptr);

// Gives the exchange peer memory between devices, this rank's being `device`, instead of NCCL: for
// GPUs of one host that reach each other's memory. Collective; kUnsupported on all ranks if one
// cannot (exchange/peers.h). Runs of layers over it follow each other on each rank's device, in one
// stream or by events.
Status use_peers(Exchange& exchange, const std::string& device);

}  // namespace nvfp4_moe::internal
