// --ep: divides a verb's layers over ranks.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/bench/ranks_over.h"
#include "exchange/local_ranks.h"

namespace nvfp4_moe::internal::cli {

// Adds --ep. what: the first clause of the help, "Time the layer over N ranks". ranks 0: not given.
void add_ranks(CLI::App& verb, int& ranks, const std::string& what);

struct VerbRanks {
  LocalRanks ranks;
  bool launched = false;  // this process is one rank; otherwise all ranks are its threads
  int local_rank = 0;     // if launched: the rank's number on its host
  const char* over() const { return launched ? "processes" : "threads"; }
};
// Connects threads of this process, or the ranks of mpirun or srun if it started this process as
// one of several. Then it loads the MPI adapter (examples/mpi). kInvalidArgument if MPI has another
// number of ranks, kUnsupported without the adapter and under torchrun.
Result<VerbRanks> connect_ranks(int ranks);

// Adds --over. several: the option takes a list.
void add_over(CLI::App& verb, std::string& over, bool several);
// Parses --over, without repetitions. Empty on the CPU, which refuses the option.
Result<std::vector<RanksOver>> parse_over(const std::string& over, const std::string& device);
// The device of rank `index` of this process. With --device cuda it is the GPU with the rank's
// number on its host.
Result<std::string> device_of_rank(const std::string& device, const VerbRanks& ranks, int index);

}  // namespace nvfp4_moe::internal::cli
