// RanksOver: how the devices of ranks are connected, for verbs that take --over.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/enum_names.h"
#include "core/status.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal::cli {

enum class RanksOver : uint8_t {
  kNccl,   // parallel/connect.h: use_nccl
  kPeers,  // use_peers: each GPU writes into the others' memory itself
};

// Connects the devices of an exchange in this way; this rank's is `device` ("cuda:1"). Collective.
// kUnsupported on all ranks, with the reason, if this build or machine cannot do it.
Status connect_device(Exchange& exchange, const std::string& device, RanksOver over);

}  // namespace nvfp4_moe::internal::cli

namespace nvfp4_moe::internal {
template <>
struct EnumNames<cli::RanksOver> {
  static constexpr const char* kWhat = "over";
  static constexpr std::array kAll = {"nccl", "peers"};
};
}  // namespace nvfp4_moe::internal
