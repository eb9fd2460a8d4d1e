// Polls the processes of the other ranks on this host, since the ranks' communication reports a
// dead rank only during a call. pidfds show which processes have ended, and each rank shares a page
// of memory from which the others read why it gave up. There are no connections.
//
// Ranks on other hosts, or in containers with their own pid namespaces, cannot be polled; the
// communication's own timeout reports their end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

class RankProcesses {
 public:
  // Collective. Ok on all ranks or on none: kUnsupported, with the rank and the reason, if one
  // cannot poll another.
  static Result<std::unique_ptr<RankProcesses>> open(Exchange& exchange);
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // The failure of a rank that gave up. Otherwise the error that a rank has left, that its process
  // has ended, or that it is stopped for longer than the exchange's timeout. This rank then gives
  // up with that error too, so that all ranks report the first cause. One thread at a time.
  Status poll();
  // Sets the result of the other ranks' polls from now on. Only the first call has an effect.
  void give_up(const Status& why);
  // Call it in a forked child before the destructor: the parent has not left.
  void drop_in_child() { in_child_ = true; }

 private:
  struct Page;
  struct Other {
    int rank = 0;
    int32_t pid = 0;
    int process = -1;  // pidfd
    const Page* page = nullptr;
    std::optional<Deadline> stopped{};  // set when a poll found it stopped
  };
  explicit RankProcesses(Timeout timeout) : timeout_(timeout) {}
  Status make_page();
  Status find_stopped();
  Status open_other(int rank, int32_t pid, uint64_t start_time, int32_t page_fd);

  const Timeout timeout_;
  Deadline next_poll_{Timeout{0}};  // next poll of /proc, which is slow
  int page_fd_ = -1;
  Page* page_ = nullptr;  // this rank's
  std::vector<Other> others_;
  bool in_child_ = false;
};

}  // namespace nvfp4_moe::internal
