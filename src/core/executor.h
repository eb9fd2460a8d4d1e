// Executor: how host code runs a loop on several threads.
//
// The library never creates a hidden global pool. The code that opens a layer passes an Executor or
// takes one that the layer owns, and a host with its own threads lends them through HostExecutor.
// Results never depend on the number of threads: callers split work so that each output element is
// computed by one call of the body.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace nvfp4_moe::internal {

class Executor {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;
  virtual ~Executor() = default;
  // Calls body over disjoint ranges that cover [0, count), each at most `grain` long (grain >= 1),
  // and returns when all are done. If a body throws, the exception is rethrown once no body runs
  // any more, and ranges that had not begun are skipped. May be called from several threads, which
  // serializes the calls.
  virtual void parallel_for(int64_t count, int64_t grain, const Body& body) = 0;
  virtual int threads() const = 0;
};

// Makes a fixed pool of `threads` threads, including the caller. threads <= 0: one per available
// core. In a forked child the parent's pool has only the calling thread; a pool made there has
// threads of its own.
std::unique_ptr<Executor> make_thread_pool(int threads = 0);
// Runs everything on the calling thread.
Executor& serial_executor();

}  // namespace nvfp4_moe::internal
