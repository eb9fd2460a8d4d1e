// An exchange over a host's functions: an abort during a call, and timeouts beyond what clocks can
// represent.
#include "exchange/callback.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "exchange/ranks.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// A host's all_to_all_v that blocks inside a call until it is released, and cannot notify anyone.
struct HeldHost {
  std::atomic<bool> holds{false}, is_in{false};
  static int all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                          const int64_t*, int64_t, char*, size_t) {
    auto& self = *static_cast<HeldHost*>(user);
    std::memcpy(recv, send, static_cast<size_t>(send_bytes[0]));
    self.is_in = true;
    while (self.holds) std::this_thread::yield();
    return 0;
  }
};

TEST(Exchange, AnAbortDuringACallIsWhatLaterCallsReturn) {
  HeldHost host;
  const auto exchange =
      must(connect_callbacks({&host, HeldHost::all_to_all_v, nullptr}, 0, 1, kLong));
  host.holds = true;
  host.is_in = false;
  std::thread caller([&] { EXPECT_OK((*exchange)->barrier()); });
  while (!host.is_in) std::this_thread::yield();
  (*exchange)->abort(Status(Code::kCancelled, "stopped"));
  (*exchange)->abort(Status(Code::kIo, "again"));
  host.holds = false;
  caller.join();
  EXPECT_EQ((*exchange)->poll().message(), "rank 0: stopped");
  EXPECT_EQ((*exchange)->barrier().message(), "rank 0: stopped");
  EXPECT_EQ((*exchange)->barrier().code(), Code::kCancelled);
}

TEST(Exchange, ATimeoutThatNoClockHoldsIsRefused) {
  const std::string expected = "timeout: expected at most 1000000000 ms, got 9223372036854775807";
  HeldHost host;
  const auto connect = [&](Timeout timeout) {
    return connect_callbacks({&host, HeldHost::all_to_all_v, nullptr}, 0, 1, timeout).status();
  };
  EXPECT_EQ(connect(Timeout{INT64_MAX}).message(), expected);
  EXPECT_OK(connect(kLongestExchangeTimeout));
  const auto group = must(ThreadGroup::make(2));
  EXPECT_EQ((*group)->join(0, 2, Timeout{INT64_MAX}).status().message(), expected);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
