// Scheduling of host threads: the device's mutex, and a queue of launches for each host thread.
//
// Host threads may act as ranks whose kernels wait for each other. A thread that waits for its own
// launches holds the mutex and runs them. If they are blocked it runs those of the other host
// threads. If nothing can proceed it releases the mutex for a moment, at every recursion level, so
// that the others can launch, copy and query.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/machine.h"
#include "runtime/scheduler.h"

namespace ptxemu {

// A recursive, fair mutex: threads get it in the order of their requests.
class DeviceMutex {
 public:
  void lock();
  void unlock();
  // For the owner: whether others are waiting for it.
  bool wanted();
  // Releases it at every recursion level until something has changed or the given time is over,
  // then acquires it again as often as it was held.
  void pause(std::chrono::microseconds longest);
  // Ends the pauses of others.
  void changed();

 private:
  std::mutex mutex_;
  std::condition_variable turn_, changed_;
  std::thread::id owner_;
  uint32_t depth_ = 0;
  uint64_t next_ = 0, served_ = 0, changes_ = 0;
};
using Lock = std::lock_guard<DeviceMutex>;

// Whether a chain and everything before it in its queue has ended or was abandoned.
struct Mark {
  bool reached = false;
};

// A host thread's launches in the order of its calls. Each chain's launches may overlap.
struct Queue {
  std::thread::id thread;
  struct Chain {
    cudaStream_t stream;
    std::vector<Launch> launches;  // until it is begun
    std::unique_ptr<Run> run;
    bool closed = false;  // takes no more launches
    std::shared_ptr<Mark> mark = std::make_shared<Mark>();
  };
  std::deque<Chain> chains;  // the first may have begun
};

}  // namespace ptxemu
