// Ranks over a host's functions, which are linked.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/links.h"
#include "exchange/ranks.h"
#include "exchange/socket.h"
#include "support/support.h"

namespace nvfp4_moe::test {

inline constexpr int64_t kOfferBytes = 536;  // of what a rank says to another one before they are linked

// A host's own communication, which is an exchange that nobody looks at: what it sees of the others it says in a call alone.
struct LinkHost {
  std::unique_ptr<Exchange> inner;
  // Changes the offer of each other rank on its way to this one, or looks at it.
  std::function<void(int from, std::byte* offer)> on_offer;
  std::atomic<bool> fails{false};
  int offers = 0;

  static int all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                          const int64_t* recv_bytes, int64_t, char* error, size_t error_bytes) {
    auto& self = *static_cast<LinkHost*>(user);
    if (self.fails) return 42;
    const auto world = static_cast<size_t>(self.inner->world());
    const Status status = self.inner->all_to_all_v(send, {send_bytes, world}, recv, {recv_bytes, world});
    error[status.message().copy(error, error_bytes - 1)] = 0;
    if (!status.ok()) return 1;
    if (self.on_offer && send_bytes[0] == kOfferBytes) {
      ++self.offers;
      for (size_t from = 0; from < world; ++from)
        if (static_cast<int>(from) != self.inner->rank())
          self.on_offer(static_cast<int>(from), static_cast<std::byte*>(recv) + from * kOfferBytes);
    }
    return 0;
  }
};

inline Result<std::unique_ptr<Exchange>> connect(LinkHost& host, const LinkOptions& links = {}) {
  return connect_callbacks({&host, LinkHost::all_to_all_v, nullptr}, host.inner->rank(), host.inner->world(),
                           host.inner->timeout(), links);
}

using Body = std::function<void(Exchange& exchange, LinkHost& host)>;

// Each rank on a thread. The exchanges go when all bodies have returned.
inline void on_linked(int world, const std::function<LinkOptions(int rank, LinkHost& host)>& prepare, const Body& body,
                      Timeout timeout = kLong) {
  const auto group = ThreadGroup::make(world);
  ASSERT_OK(group);
  std::vector<LinkHost> hosts(static_cast<size_t>(world));
  std::vector<std::unique_ptr<Exchange>> ranks(hosts.size());
  on_threads(world, [&](int rank) {
    LinkHost& host = hosts[static_cast<size_t>(rank)];
    auto inner = (*group)->join(rank, world, timeout);
    ASSERT_OK(inner);
    host.inner = std::move(*inner);
    const LinkOptions options = prepare ? prepare(rank, host) : LinkOptions{};
    auto exchange = connect(host, options);
    ASSERT_OK(exchange);
    ranks[static_cast<size_t>(rank)] = std::move(*exchange);
  });
  for (const auto& rank : ranks) ASSERT_NE(rank, nullptr);
  on_threads(world, [&](int rank) { body(*ranks[static_cast<size_t>(rank)], hosts[static_cast<size_t>(rank)]); });
}

inline std::string seen_without_a_call(Exchange& exchange, Timeout within = Timeout{2000}) {
  const Deadline deadline(within);
  while (exchange.look().ok() && !deadline.passed()) std::this_thread::sleep_for(Timeout{5});
  return exchange.look().message();
}

// What all ranks say of links that they do not have; that they go on without; and that nothing stays open.
inline void expect_none(int world, const std::function<LinkOptions(int rank, LinkHost& host)>& prepare,
                        const ::testing::Matcher<std::string>& why, Timeout timeout = kLong) {
  const auto open_files = [] {
    const auto all = std::filesystem::directory_iterator("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open_files();
  const double took = test::seconds_of([&] {
    on_linked(
        world, prepare,
        [&](Exchange& exchange, LinkHost&) {
          EXPECT_EQ(exchange.sees_ends().code(), Code::kUnsupported);
          EXPECT_THAT(exchange.sees_ends().message(), why);
          EXPECT_OK(exchange.barrier());
          EXPECT_OK(exchange.look());
          if (exchange.rank() == 0) {
            EXPECT_EQ(open_files(), before);
          }
          EXPECT_OK(exchange.barrier());
        },
        timeout);
  });
  EXPECT_LT(took, 8);
}

// Of hosts that differ, as they say.
inline LinkOptions on_its_own_host(int rank) { return {true, Timeout{3000}, "host " + std::to_string(rank)}; }

}  // namespace nvfp4_moe::test
