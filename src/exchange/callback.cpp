// A host's functions as a transport, and the links beside them: bytes go by the former, ends and failures by the latter.
//
// A call does not ask the links first. Where this rank has nothing for another one, that one may have done its last call
// and left before this rank comes to the same call, which goes well.
#include "exchange/callback.h"

#include <string>
#include <thread>
#include <utility>

#include "exchange/socket.h"

namespace nvfp4_moe {
namespace {

constexpr Timeout kEndComes{200};  // by a link, behind the failure of the host's function that it is the cause of

class CallbackTransport : public Transport {
 public:
  explicit CallbackTransport(const ExchangeCallbacks& callbacks) : callbacks_(callbacks) {}

  // Once, before the first call that may meet another thread's.
  void set_links(Result<std::unique_ptr<Transport>> links) {
    no_links_ = links.status();
    if (links.ok()) links_ = std::move(*links);
  }

  Status all_to_all_v(const AllToAll& call) override {
    char error[512] = {};
    const int failed = callbacks_.all_to_all_v(callbacks_.user, call.send, call.send_bytes, call.recv, call.recv_bytes,
                                               call.timeout.count(), error, sizeof(error));
    if (failed == 0) return {};
    error[sizeof(error) - 1] = 0;
    const std::string cause = error[0] != 0 ? error : "code " + std::to_string(failed) + " of the caller's function";
    return with_end({Code::kIo, std::string("exchange: ") + call.what + ": " + cause});
  }
  void abort(const Status& why) override {
    if (callbacks_.abort != nullptr) callbacks_.abort(callbacks_.user, why.message().c_str());
    if (links_) links_->abort(why);
  }
  Status look() override { return links_ ? links_->look() : Status(); }
  Status sees_ends() const override { return no_links_; }
  void drop_in_child() override {
    if (links_) links_.release()->drop_in_child();
  }

 private:
  // A host's function may not know whose end it failed by. The other ranks hear of either.
  Status with_end(const Status& failure) {
    if (!links_) return failure;
    Status seen;
    for (const Deadline deadline(kEndComes); seen.ok() && !deadline.passed(); seen = links_->look())
      std::this_thread::sleep_for(Timeout{5});
    if (seen.ok()) {
      links_->abort(failure);
      return failure;
    }
    if (failure.message().find(seen.message()) != std::string::npos) return failure;
    return {failure.code(), failure.message() + "; " + seen.message()};
  }

  const ExchangeCallbacks callbacks_;
  std::unique_ptr<Transport> links_;  // on which no call goes
  Status no_links_;                   // why there are none
};

}  // namespace

Result<std::unique_ptr<Exchange>> connect_callbacks(const ExchangeCallbacks& callbacks, int rank, int world,
                                                    Timeout timeout, const LinkOptions& links) {
  if (callbacks.all_to_all_v == nullptr) return invalid_argument("all_to_all_v: expected a function, got null");
  auto made = std::make_unique<CallbackTransport>(callbacks);
  CallbackTransport& transport = *made;
  NVFP4_MOE_ASSIGN(auto exchange, Exchange::connect(std::move(made), rank, world, timeout));
  auto connected = connect_links(*exchange, links);
  NVFP4_MOE_TRY(exchange->look());  // what ended the host's functions meanwhile
  transport.set_links(std::move(connected));
  return exchange;
}

}  // namespace nvfp4_moe
