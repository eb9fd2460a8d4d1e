// Ranks over NCCL's test double, and the double's queries and settings.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/nccl.h"
#include "exchange/ranks.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

inline std::string library(const char* variant = "") {
  return std::string(NVFP4_MOE_FAKE_NCCL) + variant + ".so";
}

template <class Function>
Function of_fake(const char* name) {
  void* const handle = dlopen(library().c_str(), RTLD_NOW);
  return reinterpret_cast<Function>(dlsym(handle, name));
}
inline std::string calls() {
  static std::mutex mutex;  // the double has one log, which the next call overwrites
  const std::lock_guard lock(mutex);
  return of_fake<const char* (*)()>("fake_nccl_log")();
}
inline int communicators() { return of_fake<int (*)()>("fake_nccl_communicators")(); }

// A setting of the double until the end of the scope.
class Setting {
 public:
  explicit Setting(const char* name, long value = 1) : name_(name) { set(value); }
  ~Setting() { set(0); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  void set(long value) { of_fake<void (*)(const char*, long)>("fake_nccl_set")(name_, value); }
  const char* const name_;
};

inline NcclOptions fake() {
  NcclOptions options;
  options.library = library();
  return options;
}

// Calls body on every rank of a world with NCCL. The ranks use a host's functions, as processes do.
inline void on_devices(int world, Timeout timeout,
                       const std::function<void(Exchange&, DeviceTransport&)>& body,
                       const NcclOptions& options = fake()) {
  on_ranks(Over::kCallbacks, world, timeout, [&](Exchange& exchange) {
    exchange.set_device(std::move(*must(connect_nccl(exchange, options))));
    body(exchange, *exchange.device());
  });
  EXPECT_EQ(communicators(), 0) << "a communicator is left";
}

// Each rank sends (rank + 1) bytes of its number to each, and none to rank 2. A guard follows what
// is received.
struct Blocks {
  explicit Blocks(const Exchange& exchange) {
    const int me = exchange.rank();
    for (int r = 0; r < exchange.world(); ++r) {
      send_bytes.push_back(r == 2 ? 0 : me + 1);
      recv_bytes.push_back(me == 2 ? 0 : r + 1);
      send.insert(send.end(), static_cast<size_t>(send_bytes.back()), static_cast<std::byte>(me));
      expected.insert(expected.end(), static_cast<size_t>(recv_bytes.back()),
                      static_cast<std::byte>(r));
    }
    expected.push_back(std::byte{0xEE});
    recv.resize(expected.size(), std::byte{0xEE});
  }
  AllToAll call(Timeout timeout) {
    return {"all_to_all_v", send.data(),       send_bytes.data(),
            recv.data(),    recv_bytes.data(), timeout};
  }
  std::vector<int64_t> send_bytes, recv_bytes;
  std::vector<std::byte> send, recv, expected;
};

// Options with events that a device has reached, or never reaches; `made` counts the existing ones.
inline NcclOptions with_events(std::atomic<int>& made, bool reached) {
  NcclOptions options = fake();
  options.events.set = [&made](void** event, void*) -> Status {
    if (*event == nullptr) *event = new int(++made);
    return {};
  };
  options.events.reached = [reached](void*) -> Result<bool> { return reached; };
  options.events.drop = [&made](void* event) {
    --made;
    delete static_cast<int*>(event);
  };
  return options;
}

}  // namespace nvfp4_moe::internal::test
