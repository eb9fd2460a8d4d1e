// Exchanges between ranks, over threads and over a host's functions: bytes, sums, agreement, and
// all failures.
#include "exchange/exchange.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/random.h"
#include "exchange/echo_peer.h"
#include "exchange/ranks.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr Timeout kShort{200};

struct World {
  Over over;
  int ranks;
};
class Exchanges : public testing::TestWithParam<World> {
 protected:
  void on_all(const std::function<void(Exchange&)>& body) {
    on_ranks(GetParam().over, GetParam().ranks, kLong, body);
  }
};
class SeveralRanks : public Exchanges {};

// Numbers with a sum that depends on the order: 2^24 and 1, mixed.
float element(int rank, int64_t i) {
  Random random(static_cast<uint64_t>(rank * 1000 + i));
  const float values[] = {16777216.0f, 1.0f, -16777216.0f, 0.3f};
  return values[random.below(4)];
}

TEST_P(Exchanges, AllReduceAddsInTheOrderOfTheRanks) {
  for (const int64_t count : {0, 1, 3, 64, 1001}) {
    on_all([count](Exchange& exchange) {
      std::vector<float> data, expected;
      for (int64_t i = 0; i < count; ++i) {
        data.push_back(element(exchange.rank(), i));
        float sum = element(0, i);
        for (int r = 1; r < exchange.world(); ++r) sum += element(r, i);
        expected.push_back(sum);
      }
      ASSERT_OK(exchange.all_reduce(data.data(), count));
      for (size_t i = 0; i < data.size(); ++i)
        ASSERT_EQ(std::bit_cast<uint32_t>(data[i]), std::bit_cast<uint32_t>(expected[i])) << i;
    });
  }
}

TEST_P(Exchanges, AllGatherAndBarrier) {
  std::atomic<int> before{0};
  on_all([&before](Exchange& exchange) {
    const int64_t mine = 100 + exchange.rank();
    std::vector<int64_t> all(static_cast<size_t>(exchange.world()), -1), expected(all.size());
    std::iota(expected.begin(), expected.end(), 100);
    ASSERT_OK(exchange.all_gather(&mine, sizeof(mine), all.data()));
    EXPECT_EQ(all, expected);
    ++before;
    ASSERT_OK(exchange.barrier());
    EXPECT_EQ(before.load(), exchange.world());
  });
}

// The watch thread of a device polls like this.
TEST_P(Exchanges, APollIsNoSecondCall) {
  on_all([](Exchange& exchange) {
    std::atomic<bool> ends{false};
    Status seen, called;
    std::thread watch([&] {
      while (!ends.load() && seen.ok()) {
        seen = exchange.poll();
        // polling without a pause keeps all others out
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
    });
    for (int i = 0; i < 50 && called.ok(); ++i) called = exchange.barrier();
    ends.store(true);
    watch.join();
    EXPECT_OK(called);
    EXPECT_OK(seen);
    // a rank that leaves before another has polled is reported to it
    EXPECT_OK(exchange.barrier());
  });
}

TEST_P(Exchanges, AgreeGivesTheLowestFailureToAllAndGoesOn) {
  on_all([](Exchange& exchange) {
    EXPECT_OK(exchange.agree({}));
    const int first = std::max(exchange.world() - 2, 0);  // fails, and so do all after it
    const Status mine =
        exchange.rank() >= first ? bad_input("expert 7: expected a scale") : Status();
    const Status agreed = exchange.agree(mine);
    EXPECT_EQ(agreed.code(), Code::kBadInput);
    EXPECT_EQ(agreed.message(), "rank " + std::to_string(first) + ": expert 7: expected a scale");
    Exchange::Facts facts{{"top_k", "8"}};
    EXPECT_OK(exchange.check_same("config", facts));
    if (exchange.rank() > 0) facts.push_back({"capacity", "3"});
    EXPECT_THAT(exchange.check_same("config", facts).message(),
                HasSubstr(exchange.world() > 1 ? "expected 1 values as on rank 0, got 2" : ""));
    EXPECT_OK(exchange.barrier());  // a failure that all ranks know of breaks nothing
  });
}

TEST_P(SeveralRanks, ARankThatAbortsOrLeavesEndsAllAtOnce) {
  for (const bool aborts : {true, false}) {
    const double took = seconds_of([&] {
      on_all([&](Exchange& exchange) {
        if (exchange.rank() == 1) {
          if (aborts) exchange.abort(bad_input("expert 3: expected 64 columns, got 48"));
          return;  // its exchange is destroyed
        }
        const Status ended = exchange.barrier();
        EXPECT_THAT(ended.message(),
                    HasSubstr(aborts ? "rank 1: expert 3: expected 64 columns, got 48"
                                     : "expected rank 1, got none: it has left"));
        EXPECT_EQ(exchange.barrier().message(), ended.message());  // and remains so
      });
    });
    EXPECT_LT(took, 10) << "ended by the timeout";
  }
}

TEST_P(SeveralRanks, ALateRankIsNamedByAllWithinTheTimeoutAndByItself) {
  const World world = GetParam();
  std::atomic<int> ended{0};
  on_ranks(world.over, world.ranks, kShort, [&](Exchange& exchange) {
    const bool late = exchange.rank() == world.ranks - 1;
    while (late && ended.load() < world.ranks - 1) std::this_thread::sleep_for(Timeout{1});
    Status status;
    const double took = seconds_of([&] { status = exchange.barrier(); });
    EXPECT_THAT(status, Refused(Code::kIo, "got none of rank " + std::to_string(world.ranks - 1)));
    EXPECT_THAT(status.message(), HasSubstr("within 200 ms"));
    EXPECT_LT(took, 10);
    ++ended;
    while (ended.load() < world.ranks) std::this_thread::sleep_for(Timeout{1});
  });
}

TEST_P(SeveralRanks, SizesThatDifferAreRefusedOnAll) {
  on_all([](Exchange& exchange) {
    std::vector<int64_t> send(static_cast<size_t>(exchange.world())), recv = send;
    if (exchange.rank() == 0) send[1] = 8;
    if (exchange.rank() == 1) recv[0] = 12;
    std::vector<std::byte> from(16), to(16);
    const Status status = exchange.all_to_all_v(from.data(), send, to.data(), recv);
    EXPECT_THAT(status.message(), HasSubstr("rank 1 expected 12 bytes from rank 0, which sends 8"));
  });
}

TEST_P(Exchanges, ArgumentsAreRefusedBeforeAnythingIsSent) {
  on_all([](Exchange& exchange) {
    const auto world = static_cast<size_t>(exchange.world());
    const std::vector<int64_t> none(world), too_many(world + 1);
    std::vector<int64_t> negative = none, some = none;
    negative[0] = -1;
    some[0] = 4;
    std::byte bytes[8];
    float value = 0;
    const std::pair<Status, const char*> refusals[] = {
        {exchange.all_to_all_v(bytes, too_many, bytes, none), "send_bytes"},
        {exchange.all_to_all_v(bytes, none, bytes, negative), "recv_bytes: expected sizes"},
        {exchange.all_to_all_v(nullptr, some, bytes, some), "send: expected a pointer"},
        {exchange.all_reduce(&value, -1), "count"},
        {exchange.all_gather(bytes, -1, bytes), "bytes"}};
    for (const auto& [status, text] : refusals)
      EXPECT_THAT(status, Refused(Code::kInvalidArgument, text));
    EXPECT_OK(exchange.barrier());
  });
}

std::string world_name(const testing::TestParamInfo<World>& info) {
  return std::string(name_of(info.param.over)) + "_" + std::to_string(info.param.ranks);
}
constexpr World kSeveral[] = {{Over::kThreads, 2},
                              {Over::kThreads, 3},
                              {Over::kThreads, 8},
                              {Over::kCallbacks, 2},
                              {Over::kCallbacks, 4}};
INSTANTIATE_TEST_SUITE_P(One, Exchanges,
                         testing::Values(World{Over::kThreads, 1}, World{Over::kCallbacks, 1}),
                         world_name);
INSTANTIATE_TEST_SUITE_P(All, Exchanges, testing::ValuesIn(kSeveral), world_name);
INSTANTIATE_TEST_SUITE_P(All, SeveralRanks, testing::ValuesIn(kSeveral), world_name);

TEST(ThreadGroups, RanksThatDoNotMakeAWorldAreNamedOnEveryRank) {
  const struct {
    int world, threads;
    std::function<std::pair<int, int>(int)> rank_and_world;  // of a thread
    const char* text;
  } cases[] = {
      {3, 3, [](int thread) { return std::pair(thread, thread == 1 ? 4 : 3); },
       "exchange: expected ranks of a world of 3, got rank 1 of a world of 4"},
      {3, 3, [](int thread) { return std::pair(thread == 2 ? 1 : thread, 3); },
       "exchange: expected every rank once, got rank 1 twice"},
      {5, 2, [](int thread) { return std::pair(thread, 5); },
       "in join within 200 ms, got none of ranks 2, 3 and 4"},
  };
  for (const auto& one : cases) {
    const auto group = must(ThreadGroup::make(one.world));
    on_threads(one.threads, [&](int thread) {
      const auto [rank, world] = one.rank_and_world(thread);
      const Timeout timeout = one.threads < one.world ? kShort : kLong;
      EXPECT_THAT((*group)->join(rank, world, timeout).status().message(), HasSubstr(one.text));
    });
  }
}

TEST(ThreadGroups, WorldsRanksAndTimeoutsOutsideTheirRangeAreRefused) {
  EXPECT_FALSE(ThreadGroup::make(0).ok());
  EXPECT_FALSE(ThreadGroup::make(kMostRanks + 1).ok());
  const auto joined = [](int rank, int world, Timeout timeout) {
    return (*ThreadGroup::make(world))->join(rank, world, timeout).status().message();
  };
  EXPECT_THAT(joined(2, 2, kShort), HasSubstr("expected ranks 0 to 1, got rank 2"));
  EXPECT_THAT(joined(-1, 2, kShort), HasSubstr("got rank -1"));
  EXPECT_THAT(joined(0, 1, Timeout{0}), HasSubstr("timeout"));
  EXPECT_EQ(joined(0, 2, Timeout{INT64_MAX}),  // no clock holds it
            "timeout: expected at most 1000000000 ms, got 9223372036854775807");
}

TEST(ThreadGroups, DifferentOperationsAreRefusedOnAll) {
  on_ranks(Over::kThreads, 2, kLong, [](Exchange& exchange) {
    const int64_t one = 1;  // gathers of eight bytes under either name
    int64_t all[2] = {};
    float value = 0;
    const Status status = exchange.rank() == 0 ? exchange.all_gather(&one, sizeof(one), all)
                                               : exchange.all_reduce(&value, 1);
    EXPECT_THAT(status.message(), HasSubstr("got all_gather on rank 0 and all_reduce on rank 1"));
  });
}

TEST(Callbacks, AHandshakeOfAnotherLibraryWorldOrVersionIsRefused) {
  const struct {
    size_t at, bytes;
    char value;
    std::string text;
  } cases[] = {
      {0, 8, 0, "expected a handshake of this library from rank 1, got other bytes"},
      {12, 1, 4, "expected rank 1 of a world of 2 in place 1, got rank 1 of a world of 4"},
      // without a terminating 0
      {16, 24, '9', " on rank 1 as on rank 0, got " + std::string(23, '9')},
  };
  for (const auto& one : cases) {
    EchoPeer peer;
    peer.change = [&](int64_t, std::span<std::byte> received) {
      std::memset(received.data() + one.at, one.value, one.bytes);
    };
    EXPECT_THAT(connect_callbacks({&peer, EchoPeer::all_to_all_v, nullptr}, 0, 2, kShort).status(),
                Refused(Code::kInvalidArgument, one.text));
    EXPECT_EQ(peer.calls, 1);
  }
}

TEST(Callbacks, AFailureCarriesTheHostsWords) {
  using Function = decltype(ExchangeCallbacks::all_to_all_v);
  const Function fails = [](void*, const void*, const int64_t*, void*, const int64_t*,
                            int64_t timeout_ms, char* error, size_t size) {
    const std::string text = "no route in " + std::to_string(timeout_ms) + " ms";
    (text + std::string(size, '!')).copy(error, size);  // without a terminating 0
    return 1;
  };
  const Function fails_without_a_word = [](void*, const void*, const int64_t*, void*,
                                           const int64_t*, int64_t, char*, size_t) { return 42; };
  const std::pair<Function, Status> cases[] = {
      {fails, {Code::kIo, "exchange: handshake: no route in 200 ms!!!"}},
      {fails_without_a_word, {Code::kIo, "handshake: code 42 of the caller's function"}},
      {nullptr, invalid_argument("all_to_all_v: expected a function, got null")}};
  for (const auto& [function, expected] : cases)
    EXPECT_THAT(connect_callbacks({nullptr, function, nullptr}, 0, 2, kShort).status(),
                Refused(expected.code(), expected.message()));
}

TEST(Callbacks, AnAbortDuringACallIsWhatLaterCallsReturn) {
  EchoPeer peer;
  const auto exchange =
      must(connect_callbacks({&peer, EchoPeer::all_to_all_v, nullptr}, 0, 2, kLong));
  std::atomic<bool> is_in{false}, ends{false};
  peer.change = [&](int64_t, std::span<std::byte>) {
    is_in = true;
    while (!ends) std::this_thread::yield();
  };
  std::thread caller([&] { EXPECT_OK((*exchange)->barrier()); });
  while (!is_in) std::this_thread::yield();
  (*exchange)->abort(Status(Code::kCancelled, "stopped"));
  (*exchange)->abort(Status(Code::kIo, "again"));
  ends = true;
  caller.join();
  EXPECT_EQ((*exchange)->poll().message(), "rank 0: stopped");
  EXPECT_THAT((*exchange)->barrier(), Refused(Code::kCancelled, "rank 0: stopped"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
