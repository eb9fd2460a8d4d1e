// Vector clocks: what happened before, from a thread's view. Threads with the same view share one.
//
// Within a launch every actor is a slot of its cta: its threads, and the agents that act for them
// asynchronously. A clock has, for each slot, the number up to which its accesses happened before.
// It also has the launches that have ended, by host thread: a thread's launches are numbered, and
// its chains run one after another.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace ptxemu::ordering {

// The numbers up to which a slot's accesses are done; are also ordered before the asynchronous
// proxy's (by a proxy fence); and are also ordered before other threads' tcgen05 instructions
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
  // All launches up to `before`, the beginning of a chain of the thread, and those of the chain
  // whose bit is set in `chain`.
  void add(uint32_t thread, uint32_t before, uint32_t chain);
  void add(const Launches& other);
  bool covers(const Launches& other) const;
  bool empty() const { return threads_.empty(); }

 private:
  // By host thread. Knowing a thread's chain implies knowing all earlier chains.
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
  // Returns the gathered clock and starts a new, empty one.
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

// The union of both. Threads that join the same two get the same clock.
ClockRef join(const ClockRef& a, const ClockRef& b);
// The clock after a proxy fence: everything done is ordered before the asynchronous proxy.
ClockRef raised(const ClockRef& clock);
// Forgets what join and the others remember.
void clear_clocks();

}  // namespace ptxemu::ordering
