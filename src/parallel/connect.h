// Connects the devices of an exchange's ranks. Call it before the first layer on GPUs opens over
// the exchange.
#pragma once

#include <string>

#include "backend/device_exchange.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// Gives the exchange NCCL between devices; `device` ("cuda:1") is this rank's. Collective. library
// and communicator: exchange/nccl.h.
Status use_nccl(Exchange& exchange, const std::string& device, const std::string& library = "",
                void* communicator = nullptr);

// The same for peer memory (exchange/peers.h). Runs of layers over it must be ordered on each
// rank's device, by one stream or by events.
Status use_peers(Exchange& exchange, const std::string& device);

// Calls body() with the device as the thread's current device.
template <class Body>
Status on_device(const DeviceRanks& ranks, int device, Body body) {
  const auto call = [](void* argument) -> Status { return (*static_cast<Body*>(argument))(); };
  return ranks.on_device(device, call, &body);
}

}  // namespace nvfp4_moe::internal
