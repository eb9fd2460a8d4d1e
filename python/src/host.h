// What all layers and linears of a process share on the host: one pool of threads and one workspace.
#pragma once

#include <memory>

#include "core/executor.h"
#include "moe/workspace_pool.h"

namespace nvfp4_moe::python {

struct Host {
  std::unique_ptr<Executor> executor;  // NVFP4_MOE_THREADS threads, else one per core
  WorkspacePool workspaces;
};

// The one that lives, or a new one: it goes with the last layer that holds it.
std::shared_ptr<Host> shared_host();

}  // namespace nvfp4_moe::python
