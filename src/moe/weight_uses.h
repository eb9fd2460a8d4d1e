// Counts the runs that read a layer's weights, or indicates that the weights are being replaced.
//
// One 64-bit word. The low half is the count, -1 while weights are replaced, or -2 while a
// replacement is being enqueued. The high half is the number of the process (core/fork.h) that
// counted. In a forked child the parent's runs do not count, and the child's first use starts at 0.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "core/fork.h"

namespace nvfp4_moe::internal {

class WeightUses {
 public:
  // Marks the weights as in use during its lifetime; false if they are being replaced. Uses only
  // atomics: a run takes no lock. A replacement that only enqueues lasts as long as another
  // thread's kernel launch, so it is waited for.
  class Use {
   public:
    explicit Use(WeightUses& uses) : word_(uses.word_), process_(fork_count()) {
      if (uses.held_off_.load(std::memory_order_relaxed) != 0) uses.let_pass();
      uint64_t word = word_.load(std::memory_order_relaxed);
      while (true) {
        const uint64_t now = of_process(word, process_);
        if (now == replaced(process_)) return;
        if (now == enqueued(process_)) {
          std::this_thread::yield();
          word = word_.load(std::memory_order_relaxed);
          continue;
        }
        counted_ = word_.compare_exchange_weak(word, now + 1, std::memory_order_acquire,
                                               std::memory_order_relaxed);
        if (counted_) return;
      }
    }
    ~Use() {
      // In a child that was forked during this use, the word does not include it.
      if (counted_ && process_ == fork_count()) word_.fetch_sub(1, std::memory_order_release);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return counted_; }

   private:
    std::atomic<uint64_t>& word_;
    const uint32_t process_;
    bool counted_ = false;
  };

  // While it is alive, new uses start a little later, so that those in progress can all finish. A
  // replacement that retries would otherwise hardly find the weights unused while several threads
  // run the layer.
  class HoldOff {
   public:
    explicit HoldOff(WeightUses& uses) : held_off_(uses.held_off_) {
      held_off_.fetch_add(1, std::memory_order_relaxed);
    }
    ~HoldOff() { held_off_.fetch_sub(1, std::memory_order_relaxed); }
    HoldOff(const HoldOff&) = delete;
    HoldOff& operator=(const HoldOff&) = delete;

   private:
    std::atomic<uint32_t>& held_off_;
  };

  // Exclusive access to unused weights during its lifetime; false if they are in use.
  // only_enqueues: uses that start meanwhile wait for its end.
  class Replacement {
   public:
    explicit Replacement(WeightUses& uses, bool only_enqueues = false)
        : word_(uses.word_), process_(fork_count()) {
      uint64_t word = word_.load(std::memory_order_relaxed);
      uint64_t now = of_process(word, process_);
      begun_ = now == at_rest(process_) &&
               word_.compare_exchange_strong(
                   word, only_enqueues ? enqueued(process_) : replaced(process_),
                   std::memory_order_acquire, std::memory_order_relaxed);
      if (begun_) return;
      now = of_process(word, process_);
      const bool other = now == replaced(process_) || now == enqueued(process_);
      in_flight_ = other ? -1 : static_cast<int64_t>(now - at_rest(process_));
    }
    ~Replacement() {
      if (begun_ && process_ == fork_count())
        word_.store(at_rest(process_), std::memory_order_release);
    }
    Replacement(const Replacement&) = delete;
    Replacement& operator=(const Replacement&) = delete;
    explicit operator bool() const { return begun_; }
    int64_t in_flight() const {
      return in_flight_;
    }  // number of uses if it is false; -1: another replacement

   private:
    std::atomic<uint64_t>& word_;
    const uint32_t process_;
    bool begun_ = false;
    int64_t in_flight_ = 0;
  };

 private:
  static uint64_t at_rest(uint32_t process) { return uint64_t{process} << 32; }
  static uint64_t replaced(uint32_t process) { return at_rest(process) | 0xFFFF'FFFFu; }
  static uint64_t enqueued(uint32_t process) { return at_rest(process) | 0xFFFF'FFFEu; }
  static uint64_t of_process(uint64_t word, uint32_t process) {
    return word >> 32 == process ? word : at_rest(process);
  }

  // A use nested in another one must not wait for a replacement that waits for the outer one, so it
  // continues after a millisecond.
  void let_pass() const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    while (held_off_.load(std::memory_order_relaxed) != 0 &&
           std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
  }

  std::atomic<uint64_t> word_{0};
  std::atomic<uint32_t> held_off_{0};
};

}  // namespace nvfp4_moe::internal
