// --ep: the ranks that a verb's layers are divided over, for verbs that take it.
#pragma once

#include <CLI/CLI.hpp>

#include "exchange/local_ranks.h"

namespace nvfp4_moe::cli {

// what: "Over so many ranks against one", for the help. 0: not given.
void add_ranks(CLI::App& verb, int& ranks, const std::string& what);

struct VerbRanks {
  LocalRanks ranks;
  bool launched = false;  // this process is one rank, else all are its threads
  int local_rank = 0;     // of a launched one: its number on its host
  const char* over() const { return launched ? "processes" : "threads"; }
};
// The ranks of torchrun, mpirun or srun where one of them has started this process as one of several; else threads.
// kInvalidArgument where a launcher has started another number than `ranks`.
Result<VerbRanks> connect_ranks(int ranks);

}  // namespace nvfp4_moe::cli
