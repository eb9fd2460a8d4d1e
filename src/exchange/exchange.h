// Exchange: the communication of ranks that each hold some of a layer's experts.
//
// One rank holds one Exchange. Everything here is collective: all ranks call the same function in
// the same order, and each gets the same Status if it fails as a whole. What moves bytes is a
// Transport, which does a single thing (all_to_all_v); sums, agreement and barriers are made of it
// here, so that their bits and their messages are the same over every transport. Once a transport
// has failed, the exchange is broken: its first failure is what every later call returns, at once.
// A forked child is not a rank. Every call in it fails and leaves the parent's state alone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/fork.h"
#include "core/peer_memory.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

using Timeout = std::chrono::milliseconds;
// How long a rank waits for the others if nobody says otherwise: longer than a rank is late,
// shorter than a person waits before killing a job.
inline constexpr Timeout kExchangeTimeout{30000};

// Longer than any job waits, and far from what an addition to a clock's time overflows by.
inline constexpr Timeout kLongestExchangeTimeout{1'000'000'000};

class Deadline {
 public:
  explicit Deadline(Timeout timeout) : end_(std::chrono::steady_clock::now() + timeout) {}
  bool passed() const { return std::chrono::steady_clock::now() >= end_; }

 private:
  std::chrono::steady_clock::time_point end_;
};

// The most ranks of one exchange: what a message of a failure lists by number, and what counts of
// pairs stay small for.
inline constexpr int kMostRanks = 1024;

// One rank's part of an all_to_all_v. Blocks lie one after another in the order of the ranks.
struct AllToAll {
  const char* what = "";  // the operation that the bytes belong to, for messages: "all_reduce"
  const std::byte* send = nullptr;      // (sum of send_bytes)
  const int64_t* send_bytes = nullptr;  // (world) bytes for each rank, this one included
  std::byte* recv = nullptr;            // (sum of recv_bytes), apart from send
  const int64_t* recv_bytes = nullptr;  // (world) bytes from each rank, this one included
  Timeout timeout{};
};

// Moves bytes between ranks. A transport that fails does so on every remaining rank, within the
// timeout.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual Status all_to_all_v(const AllToAll& call) = 0;
  // Ends the calls of the other ranks with this failure, as soon as it can; if it cannot, they end
  // by their timeout. From any thread, also while a call is in flight.
  virtual void abort(const Status& why) = 0;
  // The failure of another rank, or that it has left, as far as the transport knows. Does not wait.
  virtual Status poll() { return {}; }
  // Ok if poll reports the end of every other rank's process; else why only a call or its timeout
  // does.
  virtual Status can_poll() const { return {}; }
  // In a child that was forked from the rank's process, instead of its end: takes no lock, says
  // nothing to anybody, and gives back what the child has as copies of its own.
  virtual void drop_in_child() {}
};

// A connection of the ranks' devices: a library that moves bytes between them, or memory that they
// all reach.
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // The failure that ended it, here or on another rank; Ok while there is none. Does not wait.
  virtual Status state() = 0;
  // The same, unless all that was enqueued had been done before, so that nothing of it is worth
  // less for the failure. A graph's runs, which are not seen, count as not done.
  virtual Status state_of_work() { return state(); }
  // Ends what is enqueued and has not been done.
  virtual void abort(const Status& why) = 0;
  virtual std::string describe() const = 0;  // "nccl 2.28.9", "peers"
};

// Moves bytes between the ranks' device memories. Calls enqueue in a stream and do not wait for it;
// they are collective, one at a time, in the same order on all ranks.
class DeviceTransport : public DeviceLink {
 public:
  // (1) in host memory, as the device reaches it: not 0 from when the link has failed, before any
  // call that waits is ended. A kernel that follows the calls in their stream reads it, since they
  // may have brought nothing. null: there is none.
  virtual const uint32_t* failure_word() const { return nullptr; }
  // call.timeout: for the stream to have done it. `captured`: the stream is being captured into a
  // graph, and done is what the graph's runs do.
  virtual Status all_to_all_v(const AllToAll& call, void* stream, bool captured = false) = 0;
  // mine (bytes[rank]) -> all: the ranks' blocks one after another. mine may lie where its block
  // comes to lie.
  virtual Status all_gather(const void* mine, const int64_t* bytes, void* all, void* stream,
                            bool captured = false) = 0;
  // data: (count) fp32 or bf16, which becomes the sum over the ranks, in the transport's own order.
  virtual Status all_reduce(void* data, int64_t count, DType dtype, void* stream,
                            bool captured = false) = 0;
};

// Regions of every rank's device memory that all ranks' kernels write to (core/peer_memory.h).
class PeerMemory : public DeviceLink {
 public:
  struct Region {
    PeerAddresses addresses;
    int64_t size_bytes = 0;  // of each rank
  };
  // Collective, with the same number on all ranks: at least that many bytes, zeros if they are new.
  // What has been given away before stays as it is. Ok on all ranks or on none.
  virtual Result<Region> reserve(PeerRegion region, int64_t size_bytes) = 0;
  // For kernels that wait.
  virtual const PeerLink& link() const = 0;
};

// One transfer as this rank saw it, for whoever measures an exchange.
struct Transfer {
  std::string_view what;   // the operation that it was a part of: "all_gather"
  int64_t sent_bytes = 0;  // to other ranks
  double us = 0;           // until this rank could go on, what it waited for others included
};
using TransferObserver = std::function<void(const Transfer&)>;

class Exchange {
 public:
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  // Performs a handshake with all ranks and fails if they disagree on rank or world size.
  // kInvalidArgument for a rank outside [0, world); the transport's failure if a rank is missing.
  static Result<std::unique_ptr<Exchange>> connect(std::unique_ptr<Transport> transport, int rank,
                                                   int world, Timeout timeout = kExchangeTimeout);

  // kInvalidArgument for a rank that is none of a world's, or a timeout outside (0,
  // kLongestExchangeTimeout].
  static Status check_rank(int rank, int world, Timeout timeout);

  int rank() const { return rank_; }
  int world() const { return world_; }
  Timeout timeout() const { return timeout_; }

  // send: (sum of send_bytes) in the order of the ranks; recv: (sum of recv_bytes), likewise, apart
  // from send. Both byte counts have one number for each rank, this one included; a rank's
  // send_bytes[r] is what r expects of it.
  Status all_to_all_v(const void* send, std::span<const int64_t> send_bytes, void* recv,
                      std::span<const int64_t> recv_bytes);
  // mine: (bytes) -> all: (world, bytes), apart from mine.
  Status all_gather(const void* mine, int64_t bytes, void* all);
  // data: (count) fp32 or bf16, which becomes the sum over all ranks. Every element is added in
  // fp32 in the order of the ranks and rounded once to its dtype, so that all ranks get the same
  // bits, every time, over every transport.
  Status all_reduce(void* data, int64_t count, DType dtype);
  Status barrier();

  // Ok if every rank brings Ok; else, on every rank, the failure of the lowest one that has any:
  // "rank 2: message". timeout: for the slowest rank to come here; 0 takes the exchange's.
  Status agree(const Status& mine, Timeout timeout = Timeout{0});
  // (name, value) pairs that every rank must have alike. kInvalidArgument, on every rank, which
  // names the first value that differs from rank 0's, and the rank that has it.
  using Facts = std::vector<std::pair<std::string, std::string>>;
  Status check_same(std::string_view what, const Facts& mine);

  // Not collective and does not wait: the failure that ended the exchange, or that the transport
  // reports now. Ok while a call is in flight. kUnsupported in a forked child, as every call there.
  Status poll();
  // As the transport's. The same on all ranks.
  Status can_poll() const { return transport_->can_poll(); }
  // For layers on devices, either of the two; null: none. Set once, before such a layer opens; it
  // goes before the exchange does.
  void set_device(std::unique_ptr<DeviceTransport> device) { device_ = std::move(device); }
  DeviceTransport* device() const { return device_.get(); }
  void set_peers(std::unique_ptr<PeerMemory> peers) { peers_ = std::move(peers); }
  PeerMemory* peers() const { return peers_.get(); }
  // Whichever there is.
  DeviceLink* device_link() const {
    return peers_ ? static_cast<DeviceLink*>(peers_.get()) : device_.get();
  }
  // For whoever puts another one around it, before such a layer opens.
  std::unique_ptr<DeviceTransport> take_device() { return std::move(device_); }

  // Called after each transfer of this rank over host memory, on the calling thread. Empty: no
  // observer. Not while a call is in flight.
  void set_observer(TransferObserver observer) { observer_ = std::move(observer); }

  // Breaks the exchange for this rank, and for the others as far as the transport can tell them;
  // the first abort is the one that does. From any thread; a call in flight ends as the transport
  // ends it, and what follows returns `why`.
  void abort(const Status& why);
  // The same with what agree has just said on all ranks, which names a rank already.
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
  Status aborted_;  // by the first abort, which may happen during a call; guarded by abort_mutex_
  std::vector<std::byte> scratch_;   // grows with the largest call, guarded by in_use_
  std::vector<int64_t> send_bytes_;  // (world) of calls made of all_to_all_v, guarded by in_use_
  std::vector<int64_t> recv_bytes_;
  std::unique_ptr<DeviceTransport> device_;
  std::unique_ptr<PeerMemory> peers_;
  TransferObserver observer_;
};

// A transport's message about ranks that are late.
Status late_ranks(const char* what, int world, const std::vector<int>& missing, Timeout timeout);
// ... of a block that its two ranks count differently.
Status sizes_differ(const char* what, int to, int64_t expected, int from, int64_t sent);
// ... of a rank that is not there any more.
Status rank_is_gone(int rank);
// The code of a failure as another rank has sent it; kInternal if that is not a code.
Code code_of_failure(int64_t sent);
// "rank 1", "ranks 1 and 3", "ranks 0, 2 and 3": for messages.
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace nvfp4_moe::internal
