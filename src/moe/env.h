// The environment variables of the library, all five of them (docs/environment.md), read in one place.
//
// They are read when a layer is opened and kept with it: changing one later changes no open layer, and run never looks
// at the environment.
#pragma once

#include <string>

#include "core/status.h"
#include "moe/log.h"

namespace nvfp4_moe {

struct Env {
  std::string backend;                   // NVFP4_MOE_BACKEND: used where the option says "auto"
  int threads = 0;                       // NVFP4_MOE_THREADS: of a pool that a layer makes for itself; 0: one per core
  std::string dump_directory;            // NVFP4_MOE_DUMP: a repro of each call is written here before the call
  bool check = false;                    // NVFP4_MOE_CHECK: each run is also run on the reference and compared
  LogLevel log_level = LogLevel::kInfo;  // NVFP4_MOE_LOG: what the log callback gets
};

// kInvalidArgument, naming the variable, where one has a value that means nothing.
Result<Env> read_env();

}  // namespace nvfp4_moe
