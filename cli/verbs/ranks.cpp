#include "cli/verbs/ranks.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cli/console/lists.h"
#include "exchange/callback.h"
#include "nvfp4_moe/nvfp4_moe.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr const char* kAdapter = "libnvfp4_moe_mpi.so";

// Whether a launcher that sets this variable started this process as one of several.
bool one_of_several(const char* number_of_ranks) {
  const char* const value = std::getenv(number_of_ranks);
  return value != nullptr && std::atoi(value) > 1;
}

// Connects the ranks of mpirun or srun through the adapter of examples/mpi.
Result<VerbRanks> connect_mpi(int ranks) {
  const char* const asked = std::getenv("NVFP4_MOE_MPI");
  const char* const path = asked != nullptr && *asked != 0 ? asked : kAdapter;
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr)
    return unsupported(fmt::format(
        "--ep: several processes of mpirun or srun need the MPI adapter: expected {}, got {} "
        "(build examples/mpi, and set NVFP4_MOE_MPI to its path)",
        path, ::dlerror()));
  using Connect =
      int32_t(nvfp4_moe_exchange_callbacks*, int32_t*, int32_t*, int32_t*, char*, size_t);
  auto* const connect = reinterpret_cast<Connect*>(::dlsym(library, "nvfp4_moe_mpi_connect"));
  if (connect == nullptr)
    return unsupported(fmt::format("--ep: {}: expected nvfp4_moe_mpi_connect, got none", path));
  nvfp4_moe_exchange_callbacks callbacks{};
  int32_t rank = 0, world = 0, local_rank = 0;
  char error[512] = {};
  if (connect(&callbacks, &rank, &world, &local_rank, error, sizeof(error)) != 0)
    return io_error(fmt::format("--ep: {}: {}", path,
                                std::string_view(error, ::strnlen(error, sizeof(error)))));
  if (world != ranks)
    return invalid_argument(
        fmt::format("--ep: expected {}, the number of MPI ranks, got {}", world, ranks));
  NVFP4_MOE_ASSIGN(
      auto exchange,
      connect_callbacks({callbacks.user, callbacks.all_to_all_v, callbacks.abort}, rank, world));
  return VerbRanks{LocalRanks::process(std::move(exchange)), true, local_rank};
}

}  // namespace

void add_ranks(CLI::App& verb, int& ranks, const std::string& what) {
  verb.add_option("--ep", ranks,
                  what + "; ranks are threads of this process, or the processes of mpirun or srun")
      ->check(CLI::Range(1, 64));
}

Result<VerbRanks> connect_ranks(int ranks) {
  if (one_of_several("OMPI_COMM_WORLD_SIZE") || one_of_several("PMI_SIZE") ||
      (std::getenv("SLURM_STEP_ID") != nullptr && one_of_several("SLURM_NTASKS")))
    return connect_mpi(ranks);
  if (std::getenv("TORCHELASTIC_RUN_ID") != nullptr && one_of_several("WORLD_SIZE"))
    return unsupported(
        "--ep: expected no launcher, mpirun or srun, got torchrun (run `torchrun -m "
        "nvfp4_moe.verify` or "
        "`torchrun -m nvfp4_moe.bench`)");
  NVFP4_MOE_ASSIGN(LocalRanks threads, LocalRanks::threads(ranks));
  return VerbRanks{std::move(threads), false, 0};
}

void add_over(CLI::App& verb, std::string& over, bool several) {
  verb.add_option("--over", over,
                  std::string("With --ep on GPUs, how they exchange: nccl or peers (peer memory)") +
                      (several ? ", or a list" : "") + " (default: nccl)");
}

Result<std::vector<RanksOver>> parse_over(const std::string& over, const std::string& device) {
  std::vector<RanksOver> ways;
  if (device == "cpu" && over.empty()) return ways;
  if (device == "cpu") return invalid_argument("--over: expected --device cuda too, got cpu");
  const Result<std::vector<std::string>> names =
      parse_names(over.empty() ? name_of(RanksOver::kNccl) : over);
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
    return invalid_argument(
        "--device: expected cpu, or cuda (each rank uses the GPU with its number), got " + device);
  return device;
}

}  // namespace nvfp4_moe::internal::cli
