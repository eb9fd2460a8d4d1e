// Ranks as threads of a test.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "exchange/callback.h"
#include "exchange/threads.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// Calls body(rank) on a thread for each rank and waits for all.
inline void on_threads(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// An exchange that a layer shares and does not end.
inline std::shared_ptr<Exchange> borrowed(Exchange& exchange) {
  return {&exchange, [](Exchange*) {}};
}

inline constexpr Timeout kLong{20000};  // longer than any test waits

// How the ranks of a test communicate.
enum class Over { kThreads, kCallbacks };
inline const char* name_of(Over over) {
  constexpr const char* kNames[] = {"threads", "callbacks"};
  return kNames[static_cast<int>(over)];
}

// An exchange over a host's functions, as with a caller's own communication; the host itself uses
// threads.
class CalledBack {
 public:
  static Result<std::unique_ptr<CalledBack>> connect(ThreadGroup& group, int rank, int world,
                                                     Timeout timeout) {
    auto self = std::make_unique<CalledBack>();
    NVFP4_MOE_ASSIGN(self->host_, group.join(rank, world, timeout));
    NVFP4_MOE_ASSIGN(self->exchange_,
                     connect_callbacks({self.get(), all_to_all_v, abort}, rank, world, timeout));
    return self;
  }
  Exchange& exchange() { return *exchange_; }
  // Bytes sent to other ranks in all calls so far.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  static int all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                          const int64_t* recv_bytes, int64_t, char* error, size_t error_bytes) {
    auto& self = *static_cast<CalledBack*>(user);
    Exchange& host = *self.host_;
    const auto world = static_cast<size_t>(host.world());
    for (int rank = 0; rank < host.world(); ++rank)
      self.sent_bytes_ += rank == host.rank() ? 0 : send_bytes[rank];
    const Status status = host.all_to_all_v(send, {send_bytes, world}, recv, {recv_bytes, world});
    error[status.message().copy(error, error_bytes - 1)] = 0;
    return status.ok() ? 0 : 1;
  }
  static void abort(void* user, const char* message) {
    static_cast<CalledBack*>(user)->host_->abort(Status(Code::kIo, message));
  }
  int64_t sent_bytes_ = 0;
  std::unique_ptr<Exchange> host_, exchange_;
};

// Calls body(exchange) on each rank of a separate world. The exchange is destroyed when body
// returns.
inline void on_ranks(Over over, int world, Timeout timeout,
                     const std::function<void(Exchange&)>& body) {
  const auto group = must(ThreadGroup::make(world));
  on_threads(world, [&](int rank) {
    if (over == Over::kThreads) {
      body(**must((*group)->join(rank, world, timeout)));
    } else {
      body((*must(CalledBack::connect(**group, rank, world, timeout)))->exchange());
    }
  });
}

// Whether the condition becomes true in time.
inline bool comes_true(const std::function<bool()>& there) {
  for (const Deadline deadline(kLong); !there() && !deadline.passed();)
    std::this_thread::sleep_for(Timeout{5});
  return there();
}

inline double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace nvfp4_moe::internal::test
