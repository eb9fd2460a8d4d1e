// One line a launcher; what they leave open (rank 0's host, a port) is decided behind them, the same way on every rank.
#include "exchange/launcher.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "exchange/exchange.h"

namespace nvfp4_moe {
namespace {

struct Launcher {
  const char* name;
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;
  const char* also;  // without which the others mean something else; null: nothing
  const char* job;   // a name that all ranks of a job share and others do not; null: none
};
// In this order: mpirun inside a Slurm allocation sets both, and a batch script has SLURM_PROCID without being a rank.
constexpr std::array kLaunchers = {
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr, nullptr},
    Launcher{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr, "PMIX_NAMESPACE"},
    Launcher{"mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr, "PMI_JOBID"},
    Launcher{"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_STEP_ID", "SLURM_JOB_ID"},
};
constexpr int kFirstJobPort = 20000, kJobPorts = 10000;  // below what Linux gives to outgoing connections

class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  std::string_view text(const char* name) const {
    const char* const value = name == nullptr ? nullptr : variables_(name);
    return value == nullptr ? std::string_view() : std::string_view(value);
  }
  bool has(const char* name) const { return !text(name).empty(); }
  Result<int> number(const char* name, int least, int most) const {
    const std::string_view value = text(name);
    int number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error == std::errc() && end == value.data() + value.size() && number >= least && number <= most) return number;
    return invalid_argument(std::string("environment ") + name + ": expected a number from " + std::to_string(least) +
                            " to " + std::to_string(most) + ", got \"" + std::string(value) + "\"");
  }

 private:
  const Variables& variables_;
};

const Launcher* launcher_of(const Reader& read) {
  for (const Launcher& launcher : kLaunchers)
    if (read.has(launcher.rank) && read.has(launcher.world) && (launcher.also == nullptr || read.has(launcher.also)))
      return &launcher;
  return nullptr;
}

// "node[03-07,12],other" -> "node03": the first host of Slurm's list, on which task 0 runs.
std::string first_host(std::string_view list) {
  const size_t end = list.find_first_of(",[");
  std::string host(list.substr(0, end));
  if (end == std::string_view::npos || list[end] == ',') return host;
  const std::string_view numbers = list.substr(end + 1);
  return host + std::string(numbers.substr(0, numbers.find_first_of("-,]")));
}

Result<std::string> address_of(const Reader& read, const Launcher& launcher, int world) {
  if (read.has("MASTER_ADDR")) return std::string(read.text("MASTER_ADDR"));
  if (read.has(launcher.local_world)) {
    NVFP4_MOE_ASSIGN(const int local, read.number(launcher.local_world, 1, kMostRanks));
    if (local == world) return std::string("127.0.0.1");
  }
  if (world == 1) return std::string("127.0.0.1");
  if (read.has("SLURM_STEP_NODELIST")) return first_host(read.text("SLURM_STEP_NODELIST"));
  return invalid_argument(std::string("environment MASTER_ADDR: expected the host of rank 0, since ") + launcher.name +
                          " started ranks on several hosts, got none");
}

Result<int> port_of(const Reader& read, const Launcher& launcher, int world) {
  if (read.has("MASTER_PORT")) {
    NVFP4_MOE_ASSIGN(const int port, read.number("MASTER_PORT", 1, 65534));
    return port + 1;
  }
  if (world == 1) return 0;  // nobody listens
  if (!read.has(launcher.job))
    return invalid_argument(
        std::string("environment MASTER_PORT: expected a free port of rank 0's host less one, "
                    "alike on all ranks, got none"));
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const std::string_view text : {read.text(launcher.job), read.text(launcher.also)})
    for (const char letter : text) hash = (hash ^ static_cast<uint8_t>(letter)) * 16777619u;
  return kFirstJobPort + static_cast<int>(hash % kJobPorts);
}

}  // namespace

const char* environment_variable(const char* name) { return std::getenv(name); }

bool is_launched(const Variables& variables) { return launcher_of(Reader(variables)) != nullptr; }

Result<LaunchedRank> launched_rank(const Variables& variables) {
  const Reader read(variables);
  const Launcher* const launcher = launcher_of(read);
  if (launcher == nullptr)
    return invalid_argument(
        "launcher: expected RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_RANK and _SIZE (mpirun), PMI_RANK and "
        "PMI_SIZE, or SLURM_PROCID, SLURM_NTASKS and SLURM_STEP_ID (srun) in the environment, got none of these");
  LaunchedRank launched;
  launched.launcher = launcher->name;
  NVFP4_MOE_ASSIGN(launched.world, read.number(launcher->world, 1, kMostRanks));
  NVFP4_MOE_ASSIGN(launched.rank, read.number(launcher->rank, 0, launched.world - 1));
  if (read.has(launcher->local_rank)) {
    NVFP4_MOE_ASSIGN(launched.local_rank, read.number(launcher->local_rank, 0, launched.world - 1));
  }
  NVFP4_MOE_ASSIGN(launched.address, address_of(read, *launcher, launched.world));
  NVFP4_MOE_ASSIGN(launched.port, port_of(read, *launcher, launched.world));
  return launched;
}

}  // namespace nvfp4_moe
