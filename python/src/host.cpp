#include "host.h"

#include <mutex>

#include "backend/layer_steps.h"
#include "errors.h"
#include "moe/env.h"

namespace nvfp4_moe::python {

Host::Host(int threads) : executor(make_thread_pool(threads)), workspaces(allocate_host) {}

WorkspacePool& Host::workspaces_of(const Backend& backend, int device) {
  if (backend.memory == nullptr) return workspaces;
  const std::lock_guard lock(mutex_);
  return devices_.try_emplace(device, backend.allocate, device).first->second;
}

std::shared_ptr<Host> shared_host() {
  static std::mutex mutex;
  static std::weak_ptr<Host> living;
  const std::lock_guard lock(mutex);
  if (std::shared_ptr<Host> host = living.lock()) return host;
  const Env env = take(read_env());
  const auto host = std::make_shared<Host>(env.threads);
  living = host;
  return host;
}

}  // namespace nvfp4_moe::python
