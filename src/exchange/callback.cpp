// A host's functions as a transport.
#include "exchange/callback.h"

#include <string>

namespace nvfp4_moe {
namespace {

class CallbackTransport : public Transport {
 public:
  explicit CallbackTransport(const ExchangeCallbacks& callbacks) : callbacks_(callbacks) {}

  Status all_to_all_v(const AllToAll& call) override {
    char error[512] = {};
    const int failed = callbacks_.all_to_all_v(callbacks_.user, call.send, call.send_bytes, call.recv, call.recv_bytes,
                                               call.timeout.count(), error, sizeof(error));
    if (failed == 0) return {};
    error[sizeof(error) - 1] = 0;
    const std::string cause = error[0] != 0 ? error : "code " + std::to_string(failed) + " of the caller's function";
    return {Code::kIo, std::string("exchange: ") + call.what + ": " + cause};
  }
  void abort(const Status& why) override {
    if (callbacks_.abort != nullptr) callbacks_.abort(callbacks_.user, why.message().c_str());
  }

 private:
  const ExchangeCallbacks callbacks_;
};

}  // namespace

Result<std::unique_ptr<Exchange>> connect_callbacks(const ExchangeCallbacks& callbacks, int rank, int world,
                                                    Timeout timeout) {
  if (callbacks.all_to_all_v == nullptr) return invalid_argument("all_to_all_v: expected a function, got null");
  return Exchange::connect(std::make_unique<CallbackTransport>(callbacks), rank, world, timeout);
}

}  // namespace nvfp4_moe
