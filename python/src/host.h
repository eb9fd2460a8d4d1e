// What all layers and linears of a process share: one pool of threads, and the workspaces of each device.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "core/executor.h"
#include "moe/layer.h"
#include "workspaces.h"

namespace nvfp4_moe::python {

struct Host {
  explicit Host(int threads);

  std::unique_ptr<Executor> executor;  // NVFP4_MOE_THREADS threads, else one per core

  // Of the device that a layer's, or a linear's, weights are on; they live as long as this.
  Workspaces& workspaces_of(const Backend& backend, int device);
  // Gives back what no run holds, of one device or of all, and says how many bytes it was.
  size_t release_workspaces(const Device* device);

 private:
  static constexpr int kHost = -1;
  std::mutex mutex_;
  std::map<int, Workspaces> workspaces_;  // by device
};

// The one that lives, or a new one: it goes with the last layer that holds it.
std::shared_ptr<Host> shared_host();
// Null where no layer is open.
std::shared_ptr<Host> living_host();

}  // namespace nvfp4_moe::python
