// Exchanges between ranks, over threads and over a host's functions: bytes, sums, agreement, and
// all failures.
#include "exchange/exchange.h"

#include <bit>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "core/random.h"
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

// The byte that `from` sends to `to` at position i. Another sender, receiver or position gives
// another byte.
std::byte letter(int from, int to, int64_t i) {
  return static_cast<std::byte>((from * 31 + to * 7 + i * 13) % 251);
}
int64_t block_bytes(int from, int to) { return (from * 5 + to * 3) % 11; }  // 0 among them

TEST_P(Exchanges, AllToAllGivesEachRankWhatEachHasForIt) {
  on_all([](Exchange& exchange) {
    const int me = exchange.rank(), world = exchange.world();
    for (int round = 0; round < 3; ++round) {  // one call after the other over the same memory
      std::vector<int64_t> send_bytes, recv_bytes;
      std::vector<std::byte> send, expected;
      for (int r = 0; r < world; ++r) {
        send_bytes.push_back(block_bytes(me, r) + round);
        recv_bytes.push_back(block_bytes(r, me) + round);
        for (int64_t i = 0; i < send_bytes.back(); ++i) send.push_back(letter(me, r, i + round));
        for (int64_t i = 0; i < recv_bytes.back(); ++i)
          expected.push_back(letter(r, me, i + round));
      }
      std::vector<std::byte> recv(expected.size() + 1, std::byte{0xEE});
      ASSERT_OK(exchange.all_to_all_v(send.data(), send_bytes, recv.data(), recv_bytes));
      EXPECT_EQ(recv.back(), std::byte{0xEE});
      recv.pop_back();
      EXPECT_EQ(recv, expected);
    }
  });
}

// Numbers with a sum that depends on the order: 2^24 and 1, mixed.
float element(int rank, int64_t i) {
  Random random(static_cast<uint64_t>(rank * 1000 + i));
  const float values[] = {16777216.0f, 1.0f, -16777216.0f, 0.3f};
  return values[random.below(4)];
}

TEST_P(Exchanges, AllReduceAddsInTheOrderOfTheRanks) {
  for (const int64_t count : {0, 1, 3, 64, 1001}) {
    on_all([count](Exchange& exchange) {
      std::vector<float> data(static_cast<size_t>(count)), expected(data.size());
      for (int64_t i = 0; i < count; ++i) {
        data[static_cast<size_t>(i)] = element(exchange.rank(), i);
        float sum = element(0, i);
        for (int r = 1; r < exchange.world(); ++r) sum += element(r, i);
        expected[static_cast<size_t>(i)] = sum;
      }
      ASSERT_OK(exchange.all_reduce(data.data(), count));
      for (size_t i = 0; i < data.size(); ++i)
        ASSERT_EQ(std::bit_cast<uint32_t>(data[i]), std::bit_cast<uint32_t>(expected[i])) << i;
    });
  }
}

TEST_P(Exchanges, AllGatherAndBarrier) {
  on_all([](Exchange& exchange) {
    const int64_t mine = 100 + exchange.rank();
    std::vector<int64_t> all(static_cast<size_t>(exchange.world()), -1), expected(all.size());
    std::iota(expected.begin(), expected.end(), 100);
    ASSERT_OK(exchange.all_gather(&mine, sizeof(mine), all.data()));
    EXPECT_EQ(all, expected);
  });
  std::atomic<int> before{0};
  on_all([&before](Exchange& exchange) {
    ++before;
    ASSERT_OK(exchange.barrier());
    EXPECT_EQ(before.load(), exchange.world());
  });
}

// The watch thread of a device polls like this.
TEST_P(Exchanges, APollIsNoSecondCall) {
  on_all([](Exchange& exchange) {
    std::atomic<bool> ends{false};
    Status seen;
    std::thread watch([&] {
      while (!ends.load() && seen.ok()) {
        seen = exchange.poll();
        std::this_thread::sleep_for(
            std::chrono::microseconds(10));  // polling without a pause keeps all others out
      }
    });
    Status called;
    for (int i = 0; i < 50 && called.ok(); ++i) called = exchange.barrier();
    ends.store(true);
    watch.join();
    EXPECT_OK(called);
    EXPECT_OK(seen);
    EXPECT_OK(
        exchange.barrier());  // a rank that leaves before another has polled is reported to it
  });
}

TEST_P(Exchanges, AgreeGivesTheLowestFailureToAllAndGoesOn) {
  on_all([](Exchange& exchange) {
    EXPECT_OK(exchange.agree({}));
    const int last = exchange.world() - 1;
    const Status mine =
        exchange.rank() == last ? bad_input("expert 7: expected a scale") : Status();
    const Status agreed = exchange.agree(mine);
    EXPECT_EQ(agreed.code(), Code::kBadInput);
    EXPECT_EQ(agreed.message(), "rank " + std::to_string(last) + ": expert 7: expected a scale");
    EXPECT_OK(exchange.barrier());  // a failure that all ranks know of breaks nothing
  });
}

TEST_P(Exchanges, ValuesThatDifferAreNamedOnEveryRank) {
  on_all([](Exchange& exchange) {
    EXPECT_OK(exchange.check_same("config", {{"top_k", "8"}, {"hidden_size", "64"}}));
    const int last = exchange.world() - 1;
    const std::string top_k = exchange.rank() == last ? "4" : "8";
    const Status differs = exchange.check_same("config", {{"hidden_size", "64"}, {"top_k", top_k}});
    if (exchange.world() == 1) {
      EXPECT_OK(differs);
      return;
    }
    EXPECT_EQ(differs.code(), Code::kInvalidArgument);
    EXPECT_EQ(differs.message(),
              "config of rank " + std::to_string(last) + ": expected top_k 8 as on rank 0, got 4");
    Exchange::Facts facts{{"top_k", "8"}};
    if (exchange.rank() == last) facts.push_back({"capacity", "3"});
    EXPECT_THAT(exchange.check_same("config", facts).message(),
                HasSubstr("expected 1 values as on rank 0, got 2"));
    EXPECT_OK(exchange.barrier());
  });
}

TEST_P(SeveralRanks, ARankThatAbortsEndsAllAtOnce) {
  const double took = seconds_of([&] {
    on_all([](Exchange& exchange) {
      if (exchange.rank() == 1)
        return exchange.abort(bad_input("expert 3: expected 64 columns, got 48"));
      const Status ended = exchange.barrier();
      EXPECT_FALSE(ended.ok());
      EXPECT_THAT(ended.message(), HasSubstr("rank 1: expert 3: expected 64 columns, got 48"));
      EXPECT_EQ(exchange.barrier().message(), ended.message());  // and remains so
    });
  });
  EXPECT_LT(took, 10) << "ended by the timeout";
}

TEST_P(SeveralRanks, ARankThatLeavesIsNamedOnAllOthersAtOnce) {
  const double took = seconds_of([&] {
    on_all([](Exchange& exchange) {
      if (exchange.rank() == 1) return;  // its exchange is destroyed
      const Status ended = exchange.all_to_all_v(
          nullptr, std::vector<int64_t>(static_cast<size_t>(exchange.world())), nullptr,
          std::vector<int64_t>(static_cast<size_t>(exchange.world())));
      EXPECT_THAT(ended.message(), HasSubstr("expected rank 1, got none: it has left"));
    });
  });
  EXPECT_LT(took, 10) << "ended by the timeout";
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
    std::vector<int64_t> sizes(world);
    std::vector<std::byte> bytes(8);
    EXPECT_THAT(
        exchange.all_to_all_v(bytes.data(), std::vector<int64_t>(world + 1), bytes.data(), sizes),
        Refused(Code::kInvalidArgument, "send_bytes"));
    sizes[0] = -1;
    EXPECT_THAT(
        exchange.all_to_all_v(bytes.data(), std::vector<int64_t>(world), bytes.data(), sizes),
        Refused(Code::kInvalidArgument, "got -1"));
    sizes[0] = 4;
    EXPECT_THAT(exchange.all_to_all_v(nullptr, sizes, bytes.data(), sizes),
                Refused(Code::kInvalidArgument, "send: expected a pointer"));
    float value = 0;
    EXPECT_THAT(exchange.all_reduce(&value, -1), Refused(Code::kInvalidArgument, "count"));
    EXPECT_THAT(exchange.all_gather(bytes.data(), -1, bytes.data()),
                Refused(Code::kInvalidArgument, "bytes"));
    EXPECT_OK(exchange.barrier());
  });
}

std::string world_name(const testing::TestParamInfo<World>& info) {
  return std::string(name_of(info.param.over)) + "_" + std::to_string(info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(All, Exchanges,
                         testing::Values(World{Over::kThreads, 1}, World{Over::kThreads, 2},
                                         World{Over::kThreads, 3}, World{Over::kThreads, 8},
                                         World{Over::kCallbacks, 1}, World{Over::kCallbacks, 2},
                                         World{Over::kCallbacks, 4}),
                         world_name);
INSTANTIATE_TEST_SUITE_P(All, SeveralRanks,
                         testing::Values(World{Over::kThreads, 2}, World{Over::kThreads, 3},
                                         World{Over::kThreads, 8}, World{Over::kCallbacks, 2},
                                         World{Over::kCallbacks, 4}),
                         world_name);

TEST(ThreadGroups, AnotherWorldIsRefusedByNameOnEveryRank) {
  const auto group = must(ThreadGroup::make(3));
  on_threads(3, [&](int rank) {
    EXPECT_EQ((*group)->join(rank, rank == 1 ? 4 : 3, kLong).status().message(),
              "exchange: expected ranks of a world of 3, got rank 1 of a world of 4");
  });
}

TEST(ThreadGroups, ARankThatIsTakenIsRefusedByNameOnEveryRank) {
  const auto group = must(ThreadGroup::make(3));
  on_threads(3, [&](int thread) {
    EXPECT_EQ((*group)->join(thread == 2 ? 1 : thread, 3, kLong).status().message(),
              "exchange: expected every rank once, got rank 1 twice");
  });
}

TEST(ThreadGroups, RanksThatNeverComeAreNamed) {
  const auto group = must(ThreadGroup::make(4));
  on_threads(2, [&](int rank) {
    EXPECT_THAT((*group)->join(rank, 4, kShort).status().message(),
                AllOf(HasSubstr("in join within 200 ms"), HasSubstr("ranks 2 and 3")));
  });
}

TEST(ThreadGroups, WorldsAndTimeoutsOutsideTheirRangeAreRefused) {
  EXPECT_FALSE(ThreadGroup::make(0).ok());
  EXPECT_FALSE(ThreadGroup::make(kMostRanks + 1).ok());
  EXPECT_FALSE((*ThreadGroup::make(2))->join(2, 2, kShort).ok());
  EXPECT_FALSE((*ThreadGroup::make(2))->join(-1, 2, kShort).ok());
  EXPECT_THAT((*ThreadGroup::make(1))->join(0, 1, Timeout{0}).status().message(),
              HasSubstr("timeout"));
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

// A host's function that reports success but has moved nothing, or has delivered the bytes of
// another world.
int brings(void* user, const void*, const int64_t*, void* recv, const int64_t* recv_bytes, int64_t,
           char*, size_t) {
  const auto* bytes = static_cast<const std::vector<std::byte>*>(user);
  if (!bytes->empty())
    std::memcpy(recv, bytes->data(), static_cast<size_t>(recv_bytes[0] + recv_bytes[1]));
  return 0;
}

TEST(Callbacks, AHandshakeOfAnotherLibraryWorldOrVersionIsRefused) {
  std::vector<std::byte> bytes;
  EXPECT_THAT(connect_callbacks({&bytes, brings, nullptr}, 0, 2, kShort).status().message(),
              HasSubstr("expected a handshake of this library from rank 0, got other bytes"));
  struct {
    uint64_t magic = 0x3145504534504656;
    int32_t rank = 0, world = 2;
    char version[24] = "1.2.3";
  } handshakes[2];
  handshakes[1].rank = 1;
  handshakes[1].world = 4;
  const auto refusal = [&] {
    bytes.resize(sizeof(handshakes));
    std::memcpy(bytes.data(), handshakes, sizeof(handshakes));
    return connect_callbacks({&bytes, brings, nullptr}, 0, 2, kShort).status().message();
  };
  EXPECT_THAT(refusal(),
              HasSubstr("expected rank 1 of a world of 2 in place 1, got rank 1 of a world of 4"));
  handshakes[1].world = 2;
  std::memset(handshakes[1].version, '9',
              sizeof(handshakes[1].version));  // without a terminating 0
  EXPECT_EQ(refusal(), "exchange: expected nvfp4-moe 1.2.3 on rank 1 as on rank 0, got " +
                           std::string(23, '9'));
}

int fails(void*, const void*, const int64_t*, void*, const int64_t*, int64_t timeout_ms,
          char* error, size_t size) {
  const std::string text =
      "no route to rank 3 in " + std::to_string(timeout_ms) + " ms" + std::string(size, '!');
  text.copy(error, size);  // without a terminating 0, which the library must survive
  return 1;
}
int fails_without_a_word(void*, const void*, const int64_t*, void*, const int64_t*, int64_t, char*,
                         size_t) {
  return 42;
}

TEST(Callbacks, AFailureCarriesTheHostsWords) {
  const Status status = connect_callbacks({nullptr, fails, nullptr}, 0, 2, kShort).status();
  EXPECT_THAT(status, Refused(Code::kIo, "exchange: handshake: no route to rank 3 in 200 ms!!!"));
  EXPECT_THAT(
      connect_callbacks({nullptr, fails_without_a_word, nullptr}, 0, 2, kShort).status().message(),
      HasSubstr("handshake: code 42 of the caller's function"));
  EXPECT_THAT(connect_callbacks({nullptr, nullptr, nullptr}, 0, 2, kShort).status().message(),
              HasSubstr("all_to_all_v: expected a function, got null"));
}

TEST(Names, OfRanks) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({1, 3}), "ranks 1 and 3");
  EXPECT_EQ(name_ranks({0, 2, 3}), "ranks 0, 2 and 3");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
