// The ranks of an exchange that this process has: one that a launcher has started, or all of a world, each on a thread.
// For tools that go through one list of steps either way.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace nvfp4_moe {

class LocalRanks {
 public:
  // All ranks of a world of so many, connected as threads.
  static Result<LocalRanks> threads(int world, Timeout timeout = kExchangeTimeout);
  // This process is one rank. address: of rank 0's host, where the others reach it; empty: not known.
  static LocalRanks process(std::unique_ptr<Exchange> exchange, const std::string& address = "");

  int world() const { return exchanges_.front()->world(); }
  int here() const { return static_cast<int>(exchanges_.size()); }
  // Whether rank 0, which speaks for all, is one of them.
  bool has_first() const { return first_rank() == 0; }
  // The lowest of them.
  int first_rank() const { return exchanges_.front()->rank(); }
  const std::string& address() const { return address_; }
  const std::shared_ptr<Exchange>& exchange(int index) const { return exchanges_[static_cast<size_t>(index)]; }

  // Calls body(index) for each of them, on a thread of its own where there are several, and waits for all. A rank whose
  // body fails or throws aborts its exchange, so that no other one waits for it; the failure that comes back is the lowest
  // rank's.
  Status each(const std::function<Status(int index)>& body) const;

 private:
  std::vector<std::shared_ptr<Exchange>> exchanges_;  // by rank
  std::string address_;
};

}  // namespace nvfp4_moe
