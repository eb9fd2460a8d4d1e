#include "cli/verbs/ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/console/lists.h"
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

void add_over(CLI::App& verb, std::string& over, bool several) {
  verb.add_option("--over", over,
                  std::string("With --ep on GPUs, ") + (several ? "a list: " : "") + "nccl or peers; default nccl");
}

Result<std::vector<RanksOver>> parse_over(const std::string& over, const std::string& device) {
  std::vector<RanksOver> ways;
  if (device == "cpu" && over.empty()) return ways;
  if (device == "cpu") return invalid_argument("--over: expected --device cuda beside it, got cpu");
  const Result<std::vector<std::string>> names = parse_names(over.empty() ? name_of(RanksOver::kNccl) : over);
  if (!names.ok()) return names.status().in("--over");
  for (const std::string& name : *names) {
    NVFP4_MOE_ASSIGN(const RanksOver way, parse<RanksOver>(name, "--over"));
    if (std::find(ways.begin(), ways.end(), way) == ways.end()) ways.push_back(way);
  }
  return ways;
}

Result<std::string> device_of_rank(const std::string& device, const VerbRanks& ranks, int index) {
  if (device == "cuda") return fmt::format("cuda:{}", ranks.launched ? ranks.local_rank : index);
  if (device != "cpu" && !ranks.launched && ranks.ranks.world() > 1)
    return invalid_argument("--device: expected cpu, or cuda where each rank has the GPU of its number, got " + device);
  return device;
}

}  // namespace nvfp4_moe::cli
