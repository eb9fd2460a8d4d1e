// A transport made of the caller's functions, which move bytes, and the ranks' processes, which
// report ranks that end or fail.
//
// A call does not poll the processes first: a rank that expects no bytes may already have made its
// last call and exited when this rank makes the same call, which then succeeds.
#include "exchange/callback.h"

#include <string>
#include <thread>
#include <utility>

#include "exchange/processes.h"

namespace nvfp4_moe::internal {
namespace {

// time for the end of a process, which made the caller's function fail, to show up
constexpr Timeout kEndComes{200};

class CallbackTransport : public Transport {
 public:
  explicit CallbackTransport(const ExchangeCallbacks& callbacks) : callbacks_(callbacks) {}

  // Called once, before any other thread can use the transport.
  void set_processes(Result<std::unique_ptr<RankProcesses>> processes) {
    can_poll_ = processes.status();
    if (processes.ok()) processes_ = std::move(*processes);
  }

  Status all_to_all_v(const AllToAll& call) override {
    char error[512] = {};
    const int failed =
        callbacks_.all_to_all_v(callbacks_.user, call.send, call.send_bytes, call.recv,
                                call.recv_bytes, call.timeout.count(), error, sizeof(error));
    if (failed == 0) return {};
    error[sizeof(error) - 1] = 0;
    const std::string cause =
        error[0] != 0 ? error : "code " + std::to_string(failed) + " of the caller's function";
    return with_end({Code::kIo, std::string("exchange: ") + call.what + ": " + cause});
  }
  void abort(const Status& why) override {
    if (callbacks_.abort != nullptr) callbacks_.abort(callbacks_.user, why.message().c_str());
    if (processes_) processes_->give_up(why);
  }
  Status poll() override { return processes_ ? processes_->poll() : Status(); }
  Status can_poll() const override { return can_poll_; }
  void drop_in_child() override {
    if (processes_) processes_->drop_in_child();
    processes_.reset();
  }

 private:
  // The caller's function may not know which rank's exit made it fail, so poll the processes for
  // it. Either way the other ranks receive the failure.
  Status with_end(const Status& failure) {
    if (!processes_) return failure;
    Status seen;
    for (const Deadline deadline(kEndComes); seen.ok() && !deadline.passed();
         seen = processes_->poll())
      std::this_thread::sleep_for(Timeout{5});
    if (seen.ok()) {
      processes_->give_up(failure);
      return failure;
    }
    if (failure.message().find(seen.message()) != std::string::npos) return failure;
    return {failure.code(), failure.message() + "; " + seen.message()};
  }

  const ExchangeCallbacks callbacks_;
  std::unique_ptr<RankProcesses> processes_;
  Status can_poll_;
};

}  // namespace

Result<std::unique_ptr<Exchange>> connect_callbacks(const ExchangeCallbacks& callbacks, int rank,
                                                    int world, Timeout timeout) {
  if (callbacks.all_to_all_v == nullptr)
    return invalid_argument("all_to_all_v: expected a function, got null");
  auto made = std::make_unique<CallbackTransport>(callbacks);
  CallbackTransport& transport = *made;
  NVFP4_MOE_ASSIGN(auto exchange, Exchange::connect(std::move(made), rank, world, timeout));
  auto processes = RankProcesses::open(*exchange);
  NVFP4_MOE_TRY(exchange->poll());  // a failure of the caller's functions meanwhile
  transport.set_processes(std::move(processes));
  return exchange;
}

}  // namespace nvfp4_moe::internal
