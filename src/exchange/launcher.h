// Who a launcher says that this process is: torchrun, mpirun (Open MPI, and those that speak PMI) and srun each set
// variables of their own, which are read here and nowhere else.
#pragma once

#include <functional>
#include <string>

#include "core/status.h"

namespace nvfp4_moe {

struct LaunchedRank {
  std::string launcher;  // "torchrun"
  int rank = 0;
  int world = 1;
  int local_rank = 0;   // among the ranks of this host: the index of its GPU
  std::string address;  // of rank 0's host
  int port = 0;         // on which rank 0 listens there
};

// The value of an environment variable, null where it is not set.
using Variables = std::function<const char*(const char* name)>;
const char* environment_variable(const char* name);

// Whether a launcher of this list has started this process.
bool is_launched(const Variables& variables = environment_variable);
// kInvalidArgument, naming the variables, where none has, where one of them is no number, and where nothing says on which
// host rank 0 runs or which port it takes: MASTER_ADDR and MASTER_PORT always do. The port is the one behind MASTER_PORT,
// which torch.distributed takes for itself; without MASTER_PORT it is made of the job's name.
Result<LaunchedRank> launched_rank(const Variables& variables = environment_variable);

}  // namespace nvfp4_moe
