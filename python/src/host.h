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

  // The pool of this process, alive as long as this object: NVFP4_MOE_THREADS threads, else one per
  // core. In a forked child the parent's pool has no threads; layers opened there use a new pool.
  Executor& executor();
  // The workspaces of the device that holds a layer's or linear's weights, alive as long as this.
  Workspaces& workspaces_of(const Backend& backend, int device);
  // Frees the workspaces that no run uses, on one device or on all, and returns the bytes freed.
  size_t release_workspaces(const Device* device);

 private:
  static constexpr int kHost = -1;
  const int threads_;
  ForkMutex mutex_;
  std::vector<std::unique_ptr<Executor>> pools_;  // the last one is this process's, if it has one
  uint32_t process_ = 0;                          // the process that made the last one
  std::map<int, Workspaces> workspaces_;          // by device
};

// The existing host, or a new one. It is destroyed with the last layer that holds it.
std::shared_ptr<Host> shared_host();
// Null if no layer is open.
std::shared_ptr<Host> living_host();

}  // namespace nvfp4_moe::internal::python
