// One progress report of what several ranks load at once.
//
// Ranks that are threads of this process report to one object. Ranks that are processes have one each: besides the
// exchange, whose calls they may not make while they load, each has a connection to rank 0 on which it says every moment
// how far it is, also while one expert takes long; and rank 0 reports the sums. A rank that has not said so for some
// seconds (stopped, or cut off) is named in place of what was done last.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/progress.h"
#include "exchange/local_ranks.h"
#include "exchange/socket.h"

namespace nvfp4_moe {

class RanksProgress {
 public:
  struct Timing {
    std::chrono::milliseconds beat{500};     // between two words of a rank
    std::chrono::milliseconds silent{5000};  // without a word: then it is named
  };
  // Collective over the ranks. progress may be empty, and outlives this; on a process that is not rank 0 it gets that
  // rank's own steps.
  static Result<std::unique_ptr<RanksProgress>> connect(const LocalRanks& ranks, const ProgressFn& progress,
                                                        const Timing& timing);
  static Result<std::unique_ptr<RanksProgress>> connect(const LocalRanks& ranks, const ProgressFn& progress) {
    return connect(ranks, progress, Timing());
  }
  ~RanksProgress();
  // What rank ranks.first_rank() + index reports to, from a thread of its own.
  ProgressFn of_rank(int index);

 private:
  using Clock = std::chrono::steady_clock;
  struct Part {
    int64_t done = 0, total = 0, done_bytes = 0, total_bytes = 0;
    Clock::time_point heard;  // of a rank of another process
    bool elsewhere = false;   // it is such a rank, and its connection is open
  };
  // What a rank says of itself, as it lies in memory.
  struct Beat;
  struct Speaker;
  RanksProgress(const ProgressFn& progress, const Timing& timing, int first_rank, int ranks);
  Status connect_to_first(Exchange& exchange, const std::string& address);
  bool take(int rank, const Part& part, const std::string& item);
  bool report(const std::string& item) const;
  std::string silent_ranks() const;
  void speak();
  void listen();
  void hear(Speaker& speaker);

  const ProgressFn& progress_;
  const Timing timing_;
  const int first_rank_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Part> ranks_;  // guarded by mutex_, as what follows
  std::string item_;         // of this process's rank
  bool stop_ = false;

  uint64_t key_ = 0;  // of this world: rank 0 has made it, all of its ranks have it
  int rank_ = 0, world_ = 1;
  Socket socket_;       // the listener of rank 0, or the connection to it
  std::thread thread_;  // speaks or listens
};

}  // namespace nvfp4_moe
