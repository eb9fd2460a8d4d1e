#include "cli/verbs/ranks.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "exchange/callback.h"
#include "nvfp4_moe/nvfp4_moe.h"
#include "parallel/connect.h"

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

void add_ranks(CLI::App& verb, int& ranks, std::string& over, const std::string& what) {
  verb.add_option("--ep", ranks,
                  what + "; ranks are threads of this process, or the processes of mpirun or srun")
      ->check(CLI::Range(1, 64));
  verb.add_option(
          "--over", over,
          "With --ep on GPUs, how they exchange: nccl or peers (peer memory) (default: nccl)")
      ->type_name(choice_of<RanksOver>());
}

Result<std::optional<RanksOver>> parse_over(const std::string& over, const std::string& device) {
  std::optional<RanksOver> way;
  if (device != "cpu") {
    NVFP4_MOE_ASSIGN(way, parse<RanksOver>(over.empty() ? "nccl" : over, "--over"));
  } else if (!over.empty()) {
    return invalid_argument("--over: expected --device cuda too, got cpu");
  }
  return way;
}

std::string VerbRanks::device_of(const std::string& device, int index) const {
  return device == "cuda" ? fmt::format("cuda:{}", launched ? local_rank : index) : device;
}

Result<VerbRanks> connect_ranks(int ranks, const std::string& device) {
  if (one_of_several("OMPI_COMM_WORLD_SIZE") || one_of_several("PMI_SIZE") ||
      (std::getenv("SLURM_STEP_ID") != nullptr && one_of_several("SLURM_NTASKS")))
    return connect_mpi(ranks);
  if (std::getenv("TORCHELASTIC_RUN_ID") != nullptr && one_of_several("WORLD_SIZE"))
    return unsupported(
        "--ep: expected no launcher, mpirun or srun, got torchrun (run `torchrun -m "
        "nvfp4_moe.verify` or "
        "`torchrun -m nvfp4_moe.bench`)");
  if (device != "cpu" && device != "cuda" && ranks > 1)
    return invalid_argument(
        "--device: expected cpu, or cuda (each rank uses the GPU with its number), got " + device);
  NVFP4_MOE_ASSIGN(LocalRanks threads, LocalRanks::threads(ranks));
  return VerbRanks{std::move(threads), false, 0};
}

Status connect_devices(const VerbRanks& ranks, const std::string& device, RanksOver over) {
  return ranks.ranks.each([&](int index) {
    Exchange& exchange = *ranks.ranks.exchange(index);
    const std::string own = ranks.device_of(device, index);
    return over == RanksOver::kNccl ? use_nccl(exchange, own) : use_peers(exchange, own);
  });
}

ProgressStyle progress_of(const VerbRanks& ranks, ProgressStyle style) {
  style.quiet = style.quiet || !ranks.ranks.has_first();
  return style;
}

}  // namespace nvfp4_moe::internal::cli
