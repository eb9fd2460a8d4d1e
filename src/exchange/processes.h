// The processes of the other ranks on this host. The ranks' own communication reports a rank that
// died only in a call, and a kernel that waits for that rank reports nothing. So each rank polls
// the others: the kernel tells it which processes have ended (pidfd), and each rank has a page of
// memory in which the others read why it gave up.
//
// Nothing is connected and nothing listens. Ranks on other hosts, or in containers with process
// numbers of their own, cannot be polled: their end is reported by the communication's own timeout.
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

  // The failure of a rank that gave up; or that a rank has left, or its process has ended, or has
  // been stopped by a signal for longer than the exchange's timeout. This rank then gives up for
  // that too, so that ranks which poll later report the first end and not those that followed from
  // it. Does not wait. One thread at a time.
  Status poll();
  // Sets the result of the other ranks' polls from now on. Only the first call counts.
  void give_up(const Status& why);
  // In a forked child, before the end of this object: the parent has not left.
  void drop_in_child() { in_child_ = true; }

 private:
  struct Page;
  struct Other {
    int rank = 0;
    int32_t pid = 0;
    int process = -1;  // pidfd
    const Page* page = nullptr;
    std::optional<Deadline> stopped{};  // since a poll found it stopped
  };
  explicit RankProcesses(Timeout timeout) : timeout_(timeout) {}
  Status make_page();
  Status find_stopped();
  Status open_other(int rank, int32_t pid, uint64_t start_time, int32_t page_fd);

  const Timeout timeout_;
  Deadline next_poll_{Timeout{0}};  // of /proc, which is slow
  int page_fd_ = -1;
  Page* page_ = nullptr;  // this rank's
  std::vector<Other> others_;
  bool in_child_ = false;
};

}  // namespace nvfp4_moe::internal
