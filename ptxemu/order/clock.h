// Vector clocks: what a thread knows to have happened, shared between threads that know the same.
//
// Within a launch everything that acts is a slot of its cta: its threads, and the agents that act
// for them asynchronously. Of each slot a clock says up to which of its numbers accesses have
// happened before. Beside that it knows of launches that have ended before, by host thread: those
// of a thread are numbered, and its chains follow one another.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace ptxemu::ordering {

// Up to which number a slot's accesses are done; are also ordered before the asynchronous proxy's
// (a proxy fence lies between); are also ordered before other threads' tcgen05 instructions
// (tcgen05.fence::before_thread_sync).
struct Known {
  uint32_t done = 0, async = 0, tensor = 0;
};
using Slots = std::vector<Known>;
struct Part {
  uint32_t cta;
  std::shared_ptr<Slots> slots;
};
// Launches that have ended.
class Launches {
 public:
  bool has(uint32_t thread, uint32_t number) const;
  // All up to `before`, where a chain of the thread's begins, and those of the chain that `chain`
  // has a bit of.
  void add(uint32_t thread, uint32_t before, uint32_t chain);
  void add(const Launches& other);
  bool covers(const Launches& other) const;
  bool empty() const { return threads_.empty(); }

 private:
  // By host thread. Who knows of a thread's chain knows of all chains before it.
  struct Ended {
    uint32_t before = 0, chain = 0;
  };
  std::vector<Ended> threads_;
};
struct Clock {
  Launches launches;
  std::vector<Part> parts;  // by cta, ascending
  const Part* find(uint32_t cta) const;
};
using ClockRef = std::shared_ptr<const Clock>;

// A clock that is put together.
class Gather {
 public:
  void add(const ClockRef& clock);
  void add(const Launches& launches) { launches_.add(launches); }
  void add(const Part& part);
  void set(uint32_t cta, uint32_t slot, Known known);
  bool empty() const { return parts_.empty() && launches_.empty(); }
  // What was put together. The next begins empty.
  ClockRef take();

 private:
  struct Piece {
    Part part;
    bool own;
  };
  Slots& own_slots(uint32_t cta, size_t size);
  Launches launches_;
  std::vector<Piece> parts_;
  std::array<ClockRef, 4> seen_;
  uint32_t next_seen_ = 0;
};

// What either knows. Threads that join the same two get the same clock.
ClockRef join(const ClockRef& a, const ClockRef& b);
// What a proxy fence makes of it: all that is done is ordered before the asynchronous proxy.
ClockRef raised(const ClockRef& clock);
// Forgets what join and the others remember.
void clear_clocks();

}  // namespace ptxemu::ordering
