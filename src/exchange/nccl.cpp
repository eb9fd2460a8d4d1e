// Uses a non-blocking communicator: NCCL's calls return immediately, and their result is polled
// until a deadline. A watch thread polls NCCL, the exchange and events in the streams, and aborts
// the communicator after a failure, which ends the kernels.
#include "exchange/nccl.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <numeric>
#include <thread>
#include <vector>

#include "exchange/nccl_library.h"
#include "exchange/watch.h"

namespace nvfp4_moe::internal {
namespace {

constexpr std::chrono::microseconds kSettle{20};  // between polls of a call that is in progress
// Time for a communicator that graphs have captured to end, if the graphs are gone already. If not,
// it ends on its own after the last of them.
constexpr Timeout kGraphs{500};
constexpr auto kInternal = static_cast<NcclResult>(3);

// Polls until NCCL has completed the request or the deadline passes; then returns kInProgress.
NcclResult settle(const NcclLibrary& nccl, NcclCommunicator comm, const Deadline& deadline) {
  NcclResult state = NcclResult::kInProgress;
  do {
    if (nccl.get_async_error(comm, &state) != NcclResult::kSuccess) return kInternal;
    if (state != NcclResult::kInProgress) return state;
    std::this_thread::sleep_for(kSettle);
  } while (!deadline.passed());
  return state;
}

class NcclTransport : public DeviceTransport {
 public:
  NcclTransport(Exchange& exchange, const NcclLibrary& nccl, NcclCommunicator comm,
                const NcclOptions& options)
      : exchange_(exchange),
        nccl_(nccl),
        options_(options),
        owned_(options.communicator == nullptr),
        comm_(comm),
        watch_(exchange, {[this] { return seen(); }, [this](const Status&) { fails(); }}) {}

  ~NcclTransport() override {
    watch_.end();
    const Status asked = drop_done();
    static_cast<void>(asked);  // the rest may still be in progress
    for (const Pending& call : pending_) options_.events.drop(call.event);
    for (void* event : free_events_) options_.events.drop(event);
    // The exchange may have failed since the watch last polled. Destroying a communicator waits for
    // all ranks to destroy theirs; if some do not, it must be aborted.
    const bool failed = !watch_.failure().ok() || !exchange_.poll().ok();
    // Does not wait for enqueued work: a caller that drops the exchange either has its results or
    // does not need them.
    end(pending_.empty() && !failed ? CommunicatorEnd::How::kDestroy
                                    : CommunicatorEnd::How::kAbort);
    end_.wait(captured_ ? kGraphs
              : failed  ? std::min(CommunicatorEnd::kMost, exchange_.timeout())
                        : exchange_.timeout());
  }

  Status all_to_all_v(const AllToAll& call, void* stream, bool captured) override {
    const int own = exchange_.rank(), world = exchange_.world();
    const int64_t sent = std::reduce(call.send_bytes, call.send_bytes + world);
    exchange_.observe({call.what, sent - call.send_bytes[own], 0, true});
    return enqueue(call.what, call.timeout, stream, captured, [&]() -> Step {
      const std::byte* send = call.send;
      std::byte* recv = call.recv;
      Step step;
      for (int rank = 0; rank < world && !failed(step.result); ++rank) {
        step = post(rank, send, call.send_bytes[rank], recv, call.recv_bytes[rank], stream);
        send += call.send_bytes[rank];
        recv += call.recv_bytes[rank];
      }
      return step;
    });
  }

  Status all_gather(const void* mine, const int64_t* bytes, void* all, void* stream,
                    bool captured) override {
    const int own = exchange_.rank(), world = exchange_.world();
    exchange_.observe({"all_gather", bytes[own] * (world - 1), 0, true});
    return enqueue("all_gather", exchange_.timeout(), stream, captured, [&]() -> Step {
      auto* block = static_cast<std::byte*>(all);
      Step step;
      for (int rank = 0; rank < world && !failed(step.result); ++rank) {
        if (rank != own || block != mine)
          step = post(rank, mine, bytes[own], block, bytes[rank], stream);
        block += bytes[rank];
      }
      return step;
    });
  }

  const uint32_t* failure_word() const override {
    return options_.failure_word ? options_.failure_word->on_device : nullptr;
  }
  Status state() override {
    const Watch::Lock lock = watch_.lock();
    return watch_.failure();
  }
  Status state_of_work() override {
    const Watch::Lock lock = watch_.lock();
    return unfinished_ ? watch_.failure() : Status();
  }
  void abort(const Status& why) override {
    const Watch::Lock lock = watch_.lock();
    watch_.fail(why);
  }
  std::string describe() const override { return "nccl " + nccl_.version_text(); }

 private:
  // The result of an NCCL function.
  struct Step {
    const char* function = "";
    NcclResult result = NcclResult::kSuccess;
  };
  // A call that the device has not finished.
  struct Pending {
    const char* what;
    void* event;  // set after it in its stream
    Deadline deadline;
    Timeout timeout;
  };
  static bool failed(NcclResult result) {
    return result != NcclResult::kSuccess && result != NcclResult::kInProgress;
  }

  // Adds a send to a rank and a receive from it to the open group; neither if it has no bytes.
  Step post(int rank, const void* send, int64_t send_bytes, void* recv, int64_t recv_bytes,
            void* stream) const {
    Step step;
    if (send_bytes > 0)
      step = {"ncclSend", nccl_.send(send, static_cast<size_t>(send_bytes), NcclType::kBytes, rank,
                                     comm_, stream)};
    if (recv_bytes > 0 && !failed(step.result))
      step = {"ncclRecv", nccl_.recv(recv, static_cast<size_t>(recv_bytes), NcclType::kBytes, rank,
                                     comm_, stream)};
    return step;
  }

  // Called under the watch's mutex, or after all threads that use the mutex have ended.
  void end(CommunicatorEnd::How how) {
    if (!owned_ || comm_ == nullptr) return;
    end_ = CommunicatorEnd(nccl_, comm_, how, options_.on_device);
    comm_ = nullptr;
  }

  // Called under the watch's mutex.
  void fails() {
    unfinished_ = captured_ || !drop_done().ok() || !pending_.empty();
    // Must come first: the abort releases kernels that wait, and the kernels after them would treat
    // stale bytes as a result.
    if (options_.failure_word) std::atomic_ref<uint32_t>(*options_.failure_word->word).store(1);
    end(CommunicatorEnd::How::kAbort);
    for (const Pending& call : pending_) free_events_.push_back(call.event);
    pending_.clear();
  }

  // Called under the watch's mutex, or after all threads that use the mutex have ended. Stops
  // watching calls that the device has finished.
  Status drop_done() {
    while (!pending_.empty()) {
      NVFP4_MOE_ASSIGN(const bool done, options_.events.reached(pending_.front().event));
      if (!done) break;
      free_events_.push_back(pending_.front().event);
      pending_.pop_front();
    }
    return {};
  }

  // Called under the watch's mutex. Watches the call until the stream has passed this point.
  Status watch_for(Pending call, void* stream) {
    if (!free_events_.empty()) {
      call.event = free_events_.back();
      free_events_.pop_back();
    }
    const Status set = options_.events.set(&call.event, stream);
    if (set.ok())
      pending_.push_back(call);
    else if (call.event != nullptr)
      free_events_.push_back(call.event);
    return set;
  }

  template <class Body>
  Status enqueue(const char* what, Timeout timeout, void* stream, bool captured, const Body& body) {
    const Pending call{what, nullptr, Deadline(timeout), timeout};
    Watch::Lock lock = watch_.lock();
    NVFP4_MOE_TRY(watch_.failure());
    captured_ = captured_ || captured;
    Step step{"ncclGroupStart", nccl_.group_start()};
    if (!failed(step.result)) {
      step = body();
      // even after a failure: the group belongs to the thread
      const NcclResult end = nccl_.group_end();
      if (!failed(step.result)) step = {"ncclGroupEnd", end};
    }
    while (step.result == NcclResult::kInProgress) {
      // Release the mutex between polls: the watch may be the one that ends the wait.
      step.result = settle(nccl_, comm_, Deadline(Timeout{1}));
      if (step.result != NcclResult::kInProgress) break;
      if (call.deadline.passed()) return watch_.fail_all(lock, late(call));
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      NVFP4_MOE_TRY(watch_.failure());
    }
    if (failed(step.result))
      return watch_.fail_all(lock, nccl_.failure(step.function, step.result, comm_).in(call.what));
    if (captured || !options_.events.set) return {};
    if (const Status set = watch_for(call, stream); !set.ok()) return watch_.fail_all(lock, set);
    return {};
  }

  static Status late(const Pending& call) {
    return io_error(std::string("nccl: expected ") + call.what + " to be done within " +
                    std::to_string(call.timeout.count()) +
                    " ms, got no end: a rank has stopped, or has come with another call");
  }

  // Called under the watch's mutex: the status of NCCL and of the streams.
  Status seen() {
    // A caller's communicator may be gone once none of our work is pending.
    if (!owned_ && pending_.empty() && !captured_) return {};
    NcclResult state = NcclResult::kSuccess;
    const NcclResult asked = nccl_.get_async_error(comm_, &state);
    if (failed(asked) || failed(state))
      return nccl_.failure("ncclCommGetAsyncError", failed(asked) ? asked : state, comm_);
    NVFP4_MOE_TRY(drop_done());
    return !pending_.empty() && pending_.front().deadline.passed() ? late(pending_.front())
                                                                   : Status();
  }

  Exchange& exchange_;
  const NcclLibrary& nccl_;
  const NcclOptions options_;
  const bool owned_;
  // Guarded by the watch's mutex, which is held during calls with comm_, until its end:
  NcclCommunicator comm_;  // null once it ends, if this object owns it
  CommunicatorEnd end_;
  bool captured_ = false;           // graphs may hold comm_
  bool unfinished_ = false;         // at the failure: enqueued work may not have finished
  std::deque<Pending> pending_;     // in call order
  std::vector<void*> free_events_;  // grows to the largest number of pending calls
  Watch watch_;                     // last: its thread reads the other members
};

// Checks that the caller's communicator has this exchange's ranks.
Status check_adopted(const NcclLibrary& nccl, NcclCommunicator comm, const Exchange& exchange) {
  int world = 0, rank = 0;
  if (const NcclResult result = nccl.count(comm, &world); result != NcclResult::kSuccess)
    return nccl.failure("ncclCommCount", result, comm);
  if (const NcclResult result = nccl.user_rank(comm, &rank); result != NcclResult::kSuccess)
    return nccl.failure("ncclCommUserRank", result, comm);
  if (world == exchange.world() && rank == exchange.rank()) return {};
  return invalid_argument("nccl: communicator: expected rank " + std::to_string(exchange.rank()) +
                          " of a world of " + std::to_string(exchange.world()) + ", got rank " +
                          std::to_string(rank) + " of a world of " + std::to_string(world));
}

// A communicator of all ranks, from an id that rank 0 makes.
Result<NcclCommunicator> make_communicator(const NcclLibrary& nccl, Exchange& exchange) {
  NcclUniqueId mine{};
  NcclResult made = NcclResult::kSuccess;
  if (exchange.rank() == 0) made = nccl.get_unique_id(&mine);
  NVFP4_MOE_TRY(exchange.agree(
      made == NcclResult::kSuccess ? Status() : nccl.failure("ncclGetUniqueId", made, nullptr)));
  std::vector<NcclUniqueId> all(static_cast<size_t>(exchange.world()));
  NVFP4_MOE_TRY(exchange.all_gather(&mine, sizeof(mine), all.data()));
  NcclConfig config;
  config.blocking = 0;
  NcclCommunicator comm = nullptr;
  NcclResult result =
      nccl.init_rank_config(&comm, exchange.world(), all[0], exchange.rank(), &config);
  // The other half of the time is for the ranks to receive each other's failures.
  if (result == NcclResult::kInProgress)
    result = settle(nccl, comm, Deadline(exchange.timeout() / 2));
  Status status;
  if (result == NcclResult::kInProgress)
    status = io_error("nccl: expected a communicator of " + std::to_string(exchange.world()) +
                      " ranks within " + std::to_string(exchange.timeout().count() / 2) +
                      " ms, got none");
  else if (result != NcclResult::kSuccess)
    status = nccl.failure("ncclCommInitRankConfig", result, comm);
  const Status all_have_it = exchange.agree(status);
  if (!all_have_it.ok() && comm != nullptr) nccl.abort(comm);
  NVFP4_MOE_TRY(all_have_it);
  return comm;
}

}  // namespace

Result<std::unique_ptr<DeviceTransport>> connect_nccl(Exchange& exchange,
                                                      const NcclOptions& options) {
  const Result<const NcclLibrary*> opened = NcclLibrary::open(options.library);
  NVFP4_MOE_TRY(exchange.agree(opened.status()));
  const NcclLibrary& nccl = **opened;
  NVFP4_MOE_TRY(exchange.check_same(
      "nccl", {{"version", nccl.version_text()},
               {"communicator", options.communicator == nullptr ? "made here" : "given"}}));
  NcclCommunicator comm = options.communicator;
  if (comm != nullptr) {
    NVFP4_MOE_TRY(exchange.agree(check_adopted(nccl, comm, exchange)));
  } else {
    NVFP4_MOE_ASSIGN(comm, make_communicator(nccl, exchange));
  }
  return std::unique_ptr<DeviceTransport>(
      std::make_unique<NcclTransport>(exchange, nccl, comm, options));
}

}  // namespace nvfp4_moe::internal
