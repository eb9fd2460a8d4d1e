#include "cli/bench/ranks_over.h"

#include "parallel/connect.h"

namespace nvfp4_moe::internal::cli {

Status connect_device(Exchange& exchange, const std::string& device, RanksOver over) {
  switch (over) {
    case RanksOver::kNccl: return use_nccl(exchange, device);
    case RanksOver::kPeers: return use_peers(exchange, device);
  }
  return invalid_argument("over: expected a way between devices");
}

}  // namespace nvfp4_moe::internal::cli
