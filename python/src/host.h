// What all layers and linears of a process share: one pool of threads, and a pool of workspaces for each device.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "core/executor.h"
#include "moe/layer.h"
#include "moe/workspace_pool.h"

namespace nvfp4_moe::python {

struct Host {
  explicit Host(int threads);

  std::unique_ptr<Executor> executor;  // NVFP4_MOE_THREADS threads, else one per core
  WorkspacePool workspaces;            // host memory

  // Of the device that a layer's, or a linear's, weights are on; lives as long as this.
  WorkspacePool& workspaces_of(const Backend& backend, int device);

 private:
  std::mutex mutex_;
  std::map<int, WorkspacePool> devices_;
};

// The one that lives, or a new one: it goes with the last layer that holds it.
std::shared_ptr<Host> shared_host();

}  // namespace nvfp4_moe::python
