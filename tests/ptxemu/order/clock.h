// Vector clocks: what a thread knows to have happened, shared between threads that know the same.
//
// Within a launch everything that acts is a slot of its cta: its threads, and the agents that act for them
// asynchronously. Of each slot a clock says up to which of its numbers accesses have happened before. Launches that have
// ended before are one bit each.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace ptxemu::ordering {

// Up to which number a slot's accesses are done; are also ordered before the asynchronous proxy's (a proxy fence lies
// between); are also ordered before other threads' tcgen05 instructions (tcgen05.fence::before_thread_sync).
struct Known {
  uint32_t done = 0, async = 0, tensor = 0;
};
using Slots = std::vector<Known>;
struct Part {
  uint32_t cta;
  std::shared_ptr<Slots> slots;
};
struct Clock {
  uint32_t launches = 0;
  std::vector<Part> parts;  // by cta, ascending
  const Part* find(uint32_t cta) const;
};
using ClockRef = std::shared_ptr<const Clock>;

// A clock that is put together.
class Gather {
 public:
  void add(const ClockRef& clock);
  void set(uint32_t cta, uint32_t slot, Known known);
  bool empty() const { return parts_.empty() && launches_ == 0; }
  // What was put together. The next begins empty.
  ClockRef take();

 private:
  struct Piece {
    Part part;
    bool own;
  };
  Slots& own_slots(uint32_t cta, size_t size);
  uint32_t launches_ = 0;
  std::vector<Piece> parts_;
  std::array<ClockRef, 4> seen_;
  uint32_t next_seen_ = 0;
};

// What either knows. Threads that join the same two get the same clock.
ClockRef join(const ClockRef& a, const ClockRef& b);
// What a proxy fence makes of it: all that is done is ordered before the asynchronous proxy.
ClockRef raised(const ClockRef& clock);
ClockRef with_launches(const ClockRef& clock, uint32_t launches);
// Forgets what join and the others remember.
void clear_clocks();

}  // namespace ptxemu::ordering
