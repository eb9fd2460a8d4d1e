#include "cli/verbs/ranks.h"

#include <fmt/format.h>

#include "exchange/launcher.h"
#include "exchange/tcp.h"

namespace nvfp4_moe::cli {

void add_ranks(CLI::App& verb, int& ranks, const std::string& what) {
  verb.add_option("--ep", ranks,
                  what + ": threads of this process, or the processes that torchrun, mpirun or srun started")
      ->check(CLI::Range(1, 64));
}

Result<VerbRanks> connect_ranks(int ranks) {
  if (is_launched()) {
    NVFP4_MOE_ASSIGN(const LaunchedRank launched, launched_rank());
    if (launched.world > 1) {
      if (launched.world != ranks)
        return invalid_argument(fmt::format("--ep: expected {}, the ranks that {} started, got {}", launched.world,
                                            launched.launcher, ranks));
      NVFP4_MOE_ASSIGN(auto exchange, connect_tcp(launched.address, launched.port, launched.rank, launched.world));
      return VerbRanks{LocalRanks::process(std::move(exchange), launched.address), true, launched.local_rank};
    }
  }
  NVFP4_MOE_ASSIGN(LocalRanks threads, LocalRanks::threads(ranks));
  return VerbRanks{std::move(threads), false, 0};
}

}  // namespace nvfp4_moe::cli
