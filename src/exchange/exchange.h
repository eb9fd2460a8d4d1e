// Exchange: communication between ranks that each hold some of a layer's experts.
//
// Each rank has one Exchange. Everything is collective: all ranks call the same functions in the
// same order, and if a call as a whole fails, all get the same Status. Sums, agreement and barriers
// are built here on the one function of a Transport. Once a transport fails, every later call
// returns that first failure. A forked child is not a rank: every call in it fails.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fork.h"
#include "core/peer_memory.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

using Timeout = std::chrono::milliseconds;
inline constexpr Timeout kExchangeTimeout{30000};  // the default
// Small enough that adding it to a time point cannot overflow.
inline constexpr Timeout kLongestExchangeTimeout{1'000'000'000};

class Deadline {
 public:
  explicit Deadline(Timeout timeout) : end_(std::chrono::steady_clock::now() + timeout) {}
  bool passed() const { return std::chrono::steady_clock::now() >= end_; }

 private:
  std::chrono::steady_clock::time_point end_;
};

// Keeps lists of ranks in messages, and counts per pair of ranks, small.
inline constexpr int kMostRanks = 1024;

// One rank's arguments of an all_to_all_v. Blocks are contiguous, in rank order.
struct AllToAll {
  const char* what = "";                // name of the operation for messages: "all_reduce"
  const std::byte* send = nullptr;      // (sum of send_bytes)
  const int64_t* send_bytes = nullptr;  // (world) bytes for each rank, this one included
  std::byte* recv = nullptr;            // (sum of recv_bytes), does not overlap send
  const int64_t* recv_bytes = nullptr;  // (world) bytes from each rank, this one included
  Timeout timeout{};
};

// Moves bytes between ranks. It fails on every remaining rank within the timeout, or on none.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual Status all_to_all_v(const AllToAll& call) = 0;
  // Ends the calls of the other ranks with this failure, or leaves them to their timeout. May be
  // called from any thread, also while a call is in flight.
  virtual void abort(const Status& why) = 0;
  // The failure of another rank, or that it has left, as far as the transport knows. Does not wait.
  virtual Status poll() { return {}; }
  // Ok if poll reports the exit of every other rank's process; otherwise why only a call does.
  virtual Status can_poll() const { return {}; }
  // Called in a forked child instead of the destructor: takes no lock and sends nothing.
  virtual void drop_in_child() {}
};

// A connection between the ranks' devices: NCCL or peer memory.
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // The failure that ended the link, here or on another rank. Does not wait.
  virtual Status state() = 0;
  // The same, but Ok if all enqueued work had finished before the failure. Replays of a graph
  // cannot be observed and count as unfinished.
  virtual Status state_of_work() { return state(); }
  // Ends all enqueued work that has not finished.
  virtual void abort(const Status& why) = 0;
  virtual std::string describe() const = 0;  // "nccl 2.28.9", "peers"
};

// Moves bytes between the ranks' device memories. Calls enqueue in a stream and do not wait for it.
// They are collective, one at a time, in the same order on all ranks.
class DeviceTransport : public DeviceLink {
 public:
  // (1) in host memory, as a device address: nonzero once the link has failed, set before any
  // waiting call is ended. Kernels that follow the calls in their stream read it. May be null.
  virtual const uint32_t* failure_word() const { return nullptr; }
  // call.timeout limits when the stream must have finished the call. `captured`: the stream is
  // being captured into a graph, whose replays do the work.
  virtual Status all_to_all_v(const AllToAll& call, void* stream, bool captured = false) = 0;
  // Gathers mine (bytes[rank]) of each rank into all. mine may be its own block of all.
  virtual Status all_gather(const void* mine, const int64_t* bytes, void* all, void* stream,
                            bool captured = false) = 0;
};

// Regions of every rank's device memory that all ranks' kernels write to (core/peer_memory.h).
class PeerMemory : public DeviceLink {
 public:
  struct Region {
    PeerAddresses addresses;
    int64_t size_bytes = 0;  // of each rank
  };
  // Collective, with the same size on all ranks. Returns at least that many bytes, zeroed if they
  // are new. Earlier reservations stay valid. Ok on all ranks or on none.
  virtual Result<Region> reserve(PeerRegion region, int64_t size_bytes) = 0;
  // Passed to kernels that wait for other ranks.
  virtual const PeerLink& link() const = 0;
};

// A status in a message, or in memory that another rank writes: any bytes may arrive.
template <size_t kMessageBytes>
struct SentStatus {
  int32_t code = 0;
  char message[kMessageBytes] = {};  // truncated to fit, ends with 0

  SentStatus() = default;
  explicit SentStatus(const Status& status) : code(static_cast<int32_t>(status.code())) {
    status.message().copy(message, kMessageBytes - 1);
  }
  // If code is not 0. kInternal if it is not a valid code.
  Status failure() const {
    const bool legal = code > 0 && code <= static_cast<int32_t>(Code::kCancelled);
    return {legal ? static_cast<Code>(code) : Code::kInternal,
            std::string_view(message, strnlen(message, kMessageBytes - 1))};
  }
};

// One transfer as this rank saw it, for measurements.
struct Transfer {
  std::string_view what;   // the operation that it is part of: "all_gather"
  int64_t sent_bytes = 0;  // to other ranks
  double us = 0;           // until this rank could continue, including the wait for others
  bool on_device = false;  // enqueued on a device; us is not known
};
using TransferObserver = std::function<void(const Transfer&)>;

class Exchange {
 public:
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  // Performs a handshake with all ranks and fails if they disagree on rank or world size.
  static Result<std::unique_ptr<Exchange>> connect(std::unique_ptr<Transport> transport, int rank,
                                                   int world, Timeout timeout = kExchangeTimeout);

  // kInvalidArgument for an invalid world, a rank outside it, or a timeout outside (0,
  // kLongestExchangeTimeout].
  static Status check_rank(int rank, int world, Timeout timeout);

  int rank() const { return rank_; }
  int world() const { return world_; }
  Timeout timeout() const { return timeout_; }

  // As in AllToAll. send_bytes[r] must be what rank r expects from this rank.
  Status all_to_all_v(const void* send, std::span<const int64_t> send_bytes, void* recv,
                      std::span<const int64_t> recv_bytes);
  // Gathers mine (bytes) of each rank into all (world, bytes); they must not overlap.
  Status all_gather(const void* mine, int64_t bytes, void* all);
  // data (count): replaced by the sum over all ranks. Every element is added in rank order, so all
  // ranks get the same bits, over every transport.
  Status all_reduce(float* data, int64_t count);
  Status barrier();

  // Ok if every rank passes Ok. Otherwise every rank gets the failure of the lowest rank that has
  // one: "rank 2: message". timeout: for the slowest rank; 0: the exchange's.
  Status agree(const Status& mine, Timeout timeout = Timeout{0});
  // (name, value) pairs that must be the same on every rank. Otherwise every rank gets
  // kInvalidArgument with the first value that differs from rank 0's, and its rank.
  using Facts = std::vector<std::pair<std::string, std::string>>;
  Status check_same(std::string_view what, const Facts& mine);

  // Not collective and does not wait: the failure that ended the exchange, or one that the
  // transport reports now. Ok while a call is in flight.
  Status poll();
  // See Transport::can_poll. The same on all ranks.
  Status can_poll() const { return transport_->can_poll(); }
  // The link for layers on devices: at most one of the two is set, before such a layer opens.
  void set_device(std::unique_ptr<DeviceTransport> device) { device_ = std::move(device); }
  DeviceTransport* device() const { return device_.get(); }
  void set_peers(std::unique_ptr<PeerMemory> peers) { peers_ = std::move(peers); }
  PeerMemory* peers() const { return peers_.get(); }
  DeviceLink* device_link() const {
    return peers_ ? static_cast<DeviceLink*>(peers_.get()) : device_.get();
  }

  // Called after each transfer of this rank over host memory or NCCL, on the calling thread. Do not
  // set it while a call is in flight.
  void set_observer(TransferObserver observer) { observer_ = std::move(observer); }
  void observe(const Transfer& transfer) const {
    if (observer_) observer_(transfer);
  }

  // Breaks the exchange for this rank, and for the others as far as the transport can notify them.
  // Only the first abort has an effect. May be called from any thread.
  void abort(const Status& why);
  // The same for a status that agree has returned on all ranks, which already names a rank.
  void abort_agreed(const Status& why);

 private:
  Exchange(std::unique_ptr<Transport> transport, int rank, int world, Timeout timeout);
  Status aborted();
  bool forked() const { return process_ != fork_count(); }
  class Call;  // the one call in flight
  Status move(const char* what, const void* send, std::span<const int64_t> send_bytes, void* recv,
              std::span<const int64_t> recv_bytes, Timeout timeout);
  Status gather(const char* what, const void* mine, int64_t bytes, void* all, Timeout timeout);
  Status gather_texts(const char* what, const std::string& mine, std::vector<std::string>& all);
  std::byte* scratch(size_t size_bytes);

  std::unique_ptr<Transport> transport_;
  const int rank_, world_;
  const Timeout timeout_;
  const uint32_t process_ = fork_count();
  enum class Use : uint8_t { kNone, kCall, kPoll };
  std::atomic<Use> in_use_{Use::kNone};
  Status broken_;  // guarded by in_use_
  std::mutex abort_mutex_;
  Status aborted_;  // guarded by abort_mutex_: set by the first abort, maybe during a call
  std::vector<std::byte> scratch_;                // grows to the largest call, guarded by in_use_
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world) likewise
  std::unique_ptr<DeviceTransport> device_;
  std::unique_ptr<PeerMemory> peers_;
  TransferObserver observer_;
};

// A transport's error for a rank that is gone.
Status rank_is_gone(int rank);
// "rank 1", "ranks 1 and 3", "ranks 0, 2 and 3": for messages.
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace nvfp4_moe::internal
