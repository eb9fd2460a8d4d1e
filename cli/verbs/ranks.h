// --ep: the ranks that a verb's layers are divided over, for verbs that take it.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/bench/ranks_over.h"
#include "exchange/local_ranks.h"

namespace nvfp4_moe::internal::cli {

// what: "Over N ranks against one", for the help. 0: not given.
void add_ranks(CLI::App& verb, int& ranks, const std::string& what);

struct VerbRanks {
  LocalRanks ranks;
  bool launched = false;  // this process is one rank, else all are its threads
  int local_rank = 0;     // of a launched one: its number on its host
  const char* over() const { return launched ? "processes" : "threads"; }
};
// Threads of this process, or the ranks of mpirun or srun if one of them started this process as
// one of several; then the MPI adapter is loaded (examples/mpi). kInvalidArgument if MPI has
// another number of ranks, kUnsupported without the adapter and under torchrun.
Result<VerbRanks> connect_ranks(int ranks);

// --over. several: a list, all of which take turns.
void add_over(CLI::App& verb, std::string& over, bool several);
// The ways that it names, without repetitions. Empty on a host, which refuses the option.
Result<std::vector<RanksOver>> parse_over(const std::string& over, const std::string& device);
// The device of rank `index` of this process. --device cuda: the GPU with the rank's number on its
// host.
Result<std::string> device_of_rank(const std::string& device, const VerbRanks& ranks, int index);

}  // namespace nvfp4_moe::internal::cli
