// All ranks post their call; then each copies its blocks from the others' memory.
//
// Until all ranks have arrived a call may fail, because a rank is late, leaves or aborts. After
// that it cannot fail, and no rank returns while another still reads its memory.
#include "exchange/threads.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace nvfp4_moe::internal {
class ThreadGroup::Rank : public Transport {
 public:
  Rank(std::shared_ptr<ThreadGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}
  ~Rank() override { group_->leave(rank_); }
  Status all_to_all_v(const AllToAll& call) override { return group_->all_to_all_v(rank_, call); }
  void abort(const Status& why) override {
    const std::lock_guard lock(group_->mutex_);
    group_->fail(why);
  }
  Status poll() override {
    const std::lock_guard lock(group_->mutex_);
    return group_->failure_;
  }

 private:
  const std::shared_ptr<ThreadGroup> group_;
  const int rank_;
};

ThreadGroup::ThreadGroup(int world)
    : world_(world),
      joined_(static_cast<size_t>(world)),
      arrived_(static_cast<size_t>(world)),
      calls_(static_cast<size_t>(world)) {}

Result<std::shared_ptr<ThreadGroup>> ThreadGroup::make(int world) {
  if (world < 1 || world > kMostRanks)
    return invalid_argument("world: expected 1 to " + std::to_string(kMostRanks) + " ranks, got " +
                            std::to_string(world));
  return std::shared_ptr<ThreadGroup>(new ThreadGroup(world));
}

Result<std::unique_ptr<Exchange>> ThreadGroup::join(int rank, int world, Timeout timeout) {
  if (timeout > kLongestExchangeTimeout) NVFP4_MOE_TRY(Exchange::check_rank(0, 1, timeout));
  std::unique_ptr<Rank> transport;
  {
    std::unique_lock lock(mutex_);
    NVFP4_MOE_TRY(failure_);
    if (world != world_)
      fail(invalid_argument("exchange: expected ranks of a world of " + std::to_string(world_) +
                            ", got rank " + std::to_string(rank) + " of a world of " +
                            std::to_string(world)));
    else if (rank < 0 || rank >= world_)
      fail(invalid_argument("exchange: expected ranks 0 to " + std::to_string(world_ - 1) +
                            ", got rank " + std::to_string(rank)));
    else if (joined_[static_cast<size_t>(rank)])
      fail(invalid_argument("exchange: expected every rank once, got rank " + std::to_string(rank) +
                            " twice"));
    NVFP4_MOE_TRY(failure_);
    transport = std::make_unique<Rank>(shared_from_this(), rank);
    joined_[static_cast<size_t>(rank)] = true;
    changed_.notify_all();
    const auto all_there = [this] {
      return !failure_.ok() ||
             std::all_of(joined_.begin(), joined_.end(), [](bool there) { return there; });
    };
    if (!changed_.wait_for(lock, timeout, all_there)) fail(late("join", joined_, timeout));
    if (!failure_.ok()) {
      const Status failure = failure_;
      lock.unlock();  // the transport's destructor takes the lock
      return failure;
    }
  }
  return Exchange::connect(std::move(transport), rank, world, timeout);
}

Status ThreadGroup::late(const char* what, const std::vector<bool>& present,
                         Timeout timeout) const {
  std::vector<int> missing;
  for (int r = 0; r < world_; ++r)
    if (!present[static_cast<size_t>(r)]) missing.push_back(r);
  const auto ms = timeout.count();
  return io_error("exchange: expected all " + std::to_string(world_) + " ranks in " + what +
                  " within " +
                  (ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms") +
                  ", got none of " + name_ranks(missing));
}

void ThreadGroup::fail(const Status& why) {
  if (failure_.ok()) failure_ = why;
  changed_.notify_all();
}

void ThreadGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  fail(rank_is_gone(rank));
}

Status ThreadGroup::check_calls() const {
  for (int r = 1; r < world_; ++r) {
    const char* const here = calls_[0].what;
    const char* const there = calls_[static_cast<size_t>(r)].what;
    if (std::strcmp(here, there) != 0)
      return invalid_argument(std::string("exchange: expected one operation on all ranks, got ") +
                              here + " on rank 0 and " + there + " on rank " + std::to_string(r));
  }
  for (int from = 0; from < world_; ++from) {
    for (int to = 0; to < world_; ++to) {
      const int64_t sent = calls_[static_cast<size_t>(from)].send_bytes[to];
      const int64_t expected = calls_[static_cast<size_t>(to)].recv_bytes[from];
      if (sent != expected)
        return invalid_argument(std::string("exchange: ") + calls_[0].what + ": rank " +
                                std::to_string(to) + " expected " + std::to_string(expected) +
                                " bytes from rank " + std::to_string(from) + ", which sends " +
                                std::to_string(sent));
    }
  }
  return {};
}

void ThreadGroup::copy(int rank) const {
  const AllToAll& mine = calls_[static_cast<size_t>(rank)];
  std::byte* to = mine.recv;
  for (int from = 0; from < world_; ++from) {
    const AllToAll& other = calls_[static_cast<size_t>(from)];
    const int64_t before = std::reduce(other.send_bytes, other.send_bytes + rank);
    if (mine.recv_bytes[from] > 0)
      std::memcpy(to, other.send + before, static_cast<size_t>(mine.recv_bytes[from]));
    to += mine.recv_bytes[from];
  }
}

Status ThreadGroup::all_to_all_v(int rank, const AllToAll& call) {
  std::unique_lock lock(mutex_);
  NVFP4_MOE_TRY(failure_);
  const uint64_t number = begun_ + 1;
  calls_[static_cast<size_t>(rank)] = call;
  arrived_[static_cast<size_t>(rank)] = true;
  if (std::all_of(arrived_.begin(), arrived_.end(), [](bool there) { return there; })) {
    if (const Status same = check_calls(); !same.ok()) {
      fail(same);
      return same;
    }
    begun_ = number;
    copied_ = 0;
    changed_.notify_all();
  } else if (!changed_.wait_for(lock, call.timeout,
                                [&] { return begun_ == number || !failure_.ok(); })) {
    fail(late(call.what, arrived_, call.timeout));
  }
  if (begun_ != number) return failure_;
  lock.unlock();
  copy(rank);  // calls_ does not change until all have copied
  lock.lock();
  if (++copied_ == world_) {
    std::fill(arrived_.begin(), arrived_.end(), false);
    ended_ = number;
    changed_.notify_all();
  } else {
    changed_.wait(lock, [&] { return ended_ == number; });
  }
  return {};
}

}  // namespace nvfp4_moe::internal
