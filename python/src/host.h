// Shared by all layers and linears of a process: one pool of threads, and the workspaces of each
// device.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/executor.h"
#include "core/fork.h"
#include "moe/layer.h"
#include "workspaces.h"

namespace nvfp4_moe::internal::python {

struct Host {
  explicit Host(int threads) : threads_(threads) {}

  // The pool of this process, which lives as long as this: NVFP4_MOE_THREADS threads, else one per
  // core. In a forked child the parent's has no threads; what is opened there gets the child's own.
  Executor& executor();
  // Of the device that a layer's, or a linear's, weights are on; they live as long as this.
  Workspaces& workspaces_of(const Backend& backend, int device);
  // Gives back what no run holds, of one device or of all, and says how many bytes it was.
  size_t release_workspaces(const Device* device);

 private:
  static constexpr int kHost = -1;
  const int threads_;
  ForkMutex mutex_;
  std::vector<std::unique_ptr<Executor>> pools_;  // this process's is the last one, if it has one
  uint32_t process_ = 0;                          // that made it
  std::map<int, Workspaces> workspaces_;          // by device
};

// The one that lives, or a new one: it goes with the last layer that holds it.
std::shared_ptr<Host> shared_host();
// Null if no layer is open.
std::shared_ptr<Host> living_host();

}  // namespace nvfp4_moe::internal::python
