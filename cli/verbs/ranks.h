// --ep and --over: divides a verb's layers over ranks.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <optional>
#include <string>

#include "cli/console/progress_bar.h"
#include "core/enum_names.h"
#include "exchange/local_ranks.h"

namespace nvfp4_moe::internal::cli {

// How the devices of ranks are connected.
enum class RanksOver : uint8_t {
  kNccl,   // parallel/connect.h: use_nccl
  kPeers,  // use_peers: each GPU writes into the others' memory itself
};

// Adds --ep and --over. what: the first clause of --ep's help, "Time the layer over N ranks".
// ranks 0: not given.
void add_ranks(CLI::App& verb, int& ranks, std::string& over, const std::string& what);
// Parses --over. nullopt on the CPU, which refuses the option.
Result<std::optional<RanksOver>> parse_over(const std::string& over, const std::string& device);

struct VerbRanks {
  LocalRanks ranks;
  bool launched = false;  // this process is one rank; otherwise all ranks are its threads
  int local_rank = 0;     // if launched: the rank's number on its host

  // The device of rank `index` of this process. --device cuda: the GPU with the rank's number on
  // its host.
  std::string device_of(const std::string& device, int index) const;
};
// Connects threads of this process, or the ranks of mpirun or srun if it started this process as
// one of several. Then it loads the MPI adapter (examples/mpi). kInvalidArgument if MPI has another
// number of ranks or threads cannot share --device, kUnsupported without the adapter and under
// torchrun.
Result<VerbRanks> connect_ranks(int ranks, const std::string& device);
// Connects the ranks' devices. kUnsupported on all ranks, with the reason, if this build or machine
// cannot do it.
Status connect_devices(const VerbRanks& ranks, const std::string& device, RanksOver over);

// The progress of all ranks, drawn by rank 0.
ProgressStyle progress_of(const VerbRanks& ranks, ProgressStyle style);

}  // namespace nvfp4_moe::internal::cli

namespace nvfp4_moe::internal {
template <>
struct EnumNames<cli::RanksOver> {
  static constexpr const char* kWhat = "over";
  static constexpr std::array kAll = {"nccl", "peers"};
};
}  // namespace nvfp4_moe::internal
