#include "host.h"

#include <mutex>

#include "core/buffer.h"
#include "errors.h"
#include "moe/env.h"

namespace nvfp4_moe::python {

std::shared_ptr<Host> shared_host() {
  static std::mutex mutex;
  static std::weak_ptr<Host> living;
  const std::lock_guard lock(mutex);
  if (std::shared_ptr<Host> host = living.lock()) return host;
  const Env env = take(read_env());
  std::shared_ptr<Host> host(new Host{make_thread_pool(env.threads), WorkspacePool(allocate_pages)});
  living = host;
  return host;
}

}  // namespace nvfp4_moe::python
