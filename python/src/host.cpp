#include "host.h"

#include <mutex>
#include <vector>

#include "errors.h"
#include "moe/env.h"

namespace nvfp4_moe::internal::python {

namespace {

ForkMutex living_mutex;
// never destroyed: daemon threads may use it while the process exits
std::weak_ptr<Host>& living = *new std::weak_ptr<Host>;

}  // namespace

Executor& Host::executor() {
  const std::lock_guard lock(mutex_);
  if (pools_.empty() || process_ != fork_count()) {
    pools_.push_back(make_thread_pool(threads_));
    process_ = fork_count();
  }
  return *pools_.back();
}

Workspaces& Host::workspaces_of(const Backend& backend, int device) {
  const int key = backend.memory == nullptr ? kHost : device;
  const std::lock_guard lock(mutex_);
  return workspaces_.try_emplace(key, backend, device).first->second;
}

size_t Host::release_workspaces(const Device* device) {
  std::vector<Workspaces*> chosen;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [key, workspaces] : workspaces_)
      if (device == nullptr || key == (device->is_host() ? kHost : device->index))
        chosen.push_back(&workspaces);
  }
  size_t released = 0;
  for (Workspaces* workspaces : chosen) released += workspaces->release();
  return released;
}

std::shared_ptr<Host> shared_host() {
  const std::lock_guard lock(living_mutex);
  if (std::shared_ptr<Host> host = living.lock()) return host;
  const Env env = take(read_env());
  const auto host = std::make_shared<Host>(env.threads);
  living = host;
  return host;
}

std::shared_ptr<Host> living_host() {
  const std::lock_guard lock(living_mutex);
  return living.lock();
}

}  // namespace nvfp4_moe::internal::python
