// Runs a chain of launches. Each may begin before its predecessor ends if both request it.
//
// Several runs can be active if host threads act as ranks. Each proceeds until it is blocked, and
// then another one runs (cudart/queues.h).
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/control.h"

namespace ptxemu {

class Run {
 public:
  enum class State {
    kEnded,
    kPolls,  // all running threads only poll memory
    kWaits,  // and read the time or sleep in between: they wait for another run, for the host, or
             // for the time
  };

  explicit Run(std::vector<Launch> launches);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Proceeds until it has ended or is blocked. worked: whether anything was done. Throws
  // LaunchFailure, also if it waits and nothing can wake it any more.
  State go_on(bool& worked, bool patient);
  // Threads look up again to which allocation an address belongs.
  void forget_allocations();

 private:
  void prepare(Launch& launch, Launch* predecessor);
  State advance(bool& worked, bool patient);
  bool round();
  bool release_held();
  bool work();
  bool grow();
  bool release();

  std::vector<Launch> launches_;
  Order order_;
  bool polling_ = false, skipped_ = false, outside_ = false;
  uint64_t idle_ = 0, seen_ = ~0ull, released_ = 0, skipped_rounds_ = 0, progress_ = 0;
};

}  // namespace ptxemu
