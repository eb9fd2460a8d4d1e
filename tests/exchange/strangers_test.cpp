// Strangers wherever ranks listen, ranks that are none where others connect, and counts that would place arrays.
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange/hostile.h"
#include "exchange/ranks_progress.h"
#include "moe/announcement.h"
#include "support/attack.h"

namespace nvfp4_moe::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr const char* kLoopback = "127.0.0.1";

// A greeting as rendezvous.cpp lays it out.

struct Greeting {
  uint64_t magic = 0x3150435434504656;
  int32_t rank = 1, world = 2, port = 1, reserved = 0;
  char address[64] = "127.0.0.1";
};

ATTACK_TEST(kHostilePeers, Strangers, WhereRanksMeetAreSentAway) {
  std::vector<Bytes> greetings;
  const Greeting greeting;
  for (size_t end = 0; end < sizeof(greeting); ++end)  // halves
    greetings.emplace_back(bytes_of(greeting).begin(), bytes_of(greeting).begin() + static_cast<std::ptrdiff_t>(end));
  for (int bit = 0; bit < 64; ++bit) {  // other magics
    Greeting other;
    other.magic ^= uint64_t{1} << bit;
    greetings.emplace_back(bytes_of(other).begin(), bytes_of(other).end());
  }
  Greeting endless;
  std::memset(endless.address, 'x', sizeof(endless.address));
  greetings.emplace_back(bytes_of(endless).begin(), bytes_of(endless).end());
  const int port = free_port();
  std::vector<Socket> strangers;
  on_threads(2, [&](int rank) {
    if (rank == 1) {  // comes behind all of them
      for (const Bytes& bytes : greetings) {
        attacked();
        auto stranger = connect_to(kLoopback, port, Deadline(kLong));
        ASSERT_OK(stranger);
        write_all(*stranger, bytes, Deadline(kLong));
        if (bytes.size() % 2 == 0) strangers.push_back(std::move(*stranger));  // others go at once
      }
    }
    const auto exchange = connect_tcp(kLoopback, port, rank, 2, kLong);
    ASSERT_OK(exchange);
    EXPECT_OK((*exchange)->barrier());
  });
}

ATTACK_TEST(kHostilePeers, Strangers, AGreetingOfNoRankEndsTheMeetingByName) {
  const auto greeted = [](const Greeting& greeting) {
    attacked();
    const int port = free_port();
    Status status;
    on_threads(2, [&](int thread) {
      if (thread == 0) {
        status = connect_tcp(kLoopback, port, 0, 2, kPeerTimeout).status();
        return;
      }
      const auto stranger = connect_to(kLoopback, port, Deadline(kLong));
      ASSERT_OK(stranger);
      write_all(*stranger, bytes_of(greeting), Deadline(kLong));
      ::shutdown(stranger->fd(), SHUT_WR);
      Bytes heard(600);
      read_all(*stranger, heard, Deadline(kPeerTimeout));
    });
    expect_said(status);
    return status.message();
  };
  for (const int32_t world : {0, 1, 3, -2, INT32_MIN, INT32_MAX}) {
    Greeting greeting;
    greeting.world = world;
    EXPECT_THAT(greeted(greeting), HasSubstr("of a world of " + std::to_string(world)));
  }
  for (const int32_t rank : {-1, 2, INT32_MIN, INT32_MAX}) {
    Greeting greeting;
    greeting.rank = rank;
    EXPECT_THAT(greeted(greeting), HasSubstr("got rank " + std::to_string(rank)));
  }
  Greeting claims_first;
  claims_first.rank = 0;
  EXPECT_THAT(greeted(claims_first), HasSubstr("got rank 0 twice"));
  EXPECT_THAT(greeted(Greeting()), HasSubstr("it has left"));  // who it is, and then nothing
}

// Somebody else has rank 0's port.
ATTACK_TEST(kHostilePeers, Strangers, AnAnswerOfNoRankZeroIsRefused) {
  struct Answer {
    int32_t code = 0;
    char message[508] = {};
  };
  const auto answered = [](const Bytes& bytes) {
    attacked();
    const auto listener = listen_on(kLoopback, 0);
    EXPECT_OK(listener);
    Status status;
    on_threads(2, [&](int thread) {
      if (thread == 0) {
        status = connect_tcp(kLoopback, *local_port(*listener), 2, 3, Timeout{200}).status();
        return;
      }
      pollfd waits{listener->fd(), POLLIN, 0};
      ::poll(&waits, 1, 5000);
      const auto rank = accept_from(*listener);
      ASSERT_OK(rank);
      Bytes greeting(sizeof(Greeting));
      read_all(*rank, greeting, Deadline(kPeerTimeout));
      write_all(*rank, bytes, Deadline(kPeerTimeout));
    });
    expect_said(status);
    EXPECT_FALSE(status.ok());
    return status;
  };
  Answer answer;
  std::memset(answer.message, 'm', sizeof(answer.message));  // without an end
  for (const int32_t code : {1, 9, 10, -1, INT32_MIN, INT32_MAX}) {
    answer.code = code;
    const Status status = answered(Bytes(bytes_of(answer).begin(), bytes_of(answer).end()));
    EXPECT_EQ(status.code(), code == 1 || code == 9 ? static_cast<Code>(code) : Code::kInternal);
    EXPECT_EQ(status.message(), std::string(507, 'm'));
  }
  const Answer fine;
  Bytes bytes(bytes_of(fine).begin(), bytes_of(fine).end());
  EXPECT_THAT(answered(bytes).message(), HasSubstr("expected rank 0, got none"));
  EXPECT_THAT(answered(Bytes(17)).message(), HasSubstr("expected an answer of rank 0"));
  bytes.resize(bytes.size() + 3 * sizeof(Greeting), std::byte{0xA5});
  EXPECT_THAT(answered(bytes).message(), HasSubstr("expected greetings from rank 0, got other bytes"));
  // Greetings, of ranks that are nowhere.
  Greeting nowhere;
  for (const int32_t port : {0, -5, 70000}) {
    nowhere.port = port;
    bytes.resize(sizeof(fine));
    for (int rank = 0; rank < 3; ++rank) bytes.insert(bytes.end(), bytes_of(nowhere).begin(), bytes_of(nowhere).end());
    EXPECT_THAT(answered(bytes).message(), AnyOf(HasSubstr("got none"), HasSubstr("expected a host's name")));
  }
}

// ---- what ranks say of how far they are. Layouts as in ranks_progress.cpp.

ATTACK_TEST(kHostilePeers, Strangers, MoveNoProgress) {
  struct Beat {
    uint64_t magic = 0x3154414542344656;
    uint64_t key = 0;
    int32_t rank = 1, reserved = 0;
    int64_t done = 1, total = 2, done_bytes = 0, total_bytes = 0;
    char item[104] = "expert";
  };
  struct Place {
    int64_t port = 0;
    uint64_t key = 0;
  };
  const int port = free_port();
  on_threads(2, [&](int rank) {
    auto exchange = connect_tcp(kLoopback, port, rank, 2, kLong);
    ASSERT_OK(exchange);
    if (rank == 0) {
      const LocalRanks ranks = LocalRanks::process(std::move(*exchange), kLoopback);
      std::vector<std::string> lines;
      std::mutex mutex;
      const ProgressFn print = [&](const Progress& progress) {
        const std::lock_guard lock(mutex);
        lines.push_back(std::to_string(progress.done) + " " + std::string(progress.item));
        return true;
      };
      const auto progress = RanksProgress::connect(ranks, print);
      ASSERT_OK(progress);
      EXPECT_OK(ranks.exchange(0)->barrier());  // they have said all
      for (int look = 0; look < 1000; ++look) {
        const std::lock_guard lock(mutex);
        if (!lines.empty()) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      const std::lock_guard lock(mutex);
      EXPECT_EQ(lines, std::vector<std::string>{"1 rank 1: expert"});
      return;
    }
    // Rank 1, by hand.
    ASSERT_OK((*exchange)->agree({}));
    const Place mine;
    Place places[2];
    ASSERT_OK((*exchange)->all_gather(&mine, sizeof(mine), places));
    std::vector<Socket> strangers;
    const auto say = [&](const std::function<void(Beat&)>& change, size_t size = sizeof(Beat)) {
      Beat beat;
      beat.key = places[0].key;
      change(beat);
      auto stranger = connect_to(kLoopback, static_cast<int>(places[0].port), Deadline(kLong));
      ASSERT_OK(stranger);
      write_all(*stranger, std::span<const std::byte>(bytes_of(std::as_const(beat))).first(size), Deadline(kLong));
      strangers.push_back(std::move(*stranger));
    };
    const auto hostile = [&](const std::function<void(Beat&)>& change, size_t size = sizeof(Beat)) {
      attacked();
      say(change, size);
      // One at a time: what is refused is closed, halves are not.
      std::byte nothing[1];
      if (size < sizeof(Beat)) return;
      EXPECT_FALSE(read_all(strangers.back(), nothing, Deadline(kLong)));
      strangers.pop_back();
    };
    ASSERT_OK((*exchange)->agree({}));
    hostile([](Beat& beat) { beat.magic ^= 1; });
    hostile([](Beat& beat) { beat.key += 1; });
    for (const int32_t claimed : {0, 2, -1, INT32_MAX, INT32_MIN})
      hostile([claimed](Beat& beat) { beat.rank = claimed; });
    for (int64_t Beat::*const count : {&Beat::done, &Beat::total, &Beat::done_bytes, &Beat::total_bytes})
      for (const int64_t number : {int64_t{-1}, INT64_MAX, INT64_MIN})
        hostile([&](Beat& beat) { beat.*count = number; });
    hostile([](Beat& beat) { std::memset(beat.item, 'x', sizeof(beat.item)); });
    for (const size_t half : {size_t{1}, sizeof(Beat) - 1}) hostile([](Beat&) {}, half);
    say([](Beat&) {});  // rank 1 itself
    EXPECT_OK((*exchange)->barrier());
    EXPECT_FALSE((*exchange)->barrier().ok()) << "rank 0 has left";
  });
}

// ---- numbers that place arrays

ATTACK_TEST(kHostilePeers, Strangers, CountsBelowZeroAreRefusedOnAllRanks) {
  for (const int64_t wrong : {int64_t{-1}, int64_t{-5}, INT64_MIN}) {
    for (const bool tokens : {false, true}) {
      attacked();
      on_ranks(Over::kThreads, 2, kLong, [&](Exchange& exchange) {
        Announcement announcement(2, 3);
        const bool lies = exchange.rank() == 1;
        const int64_t counts[3] = {4, lies && !tokens ? wrong : 5, 6};
        const Status status = announcement.gather(exchange, lies && tokens ? wrong : 7, {}, counts);
        EXPECT_EQ(status.code(), Code::kIo);
        EXPECT_EQ(status.message(), "announcement of rank 1: expected counts from 0, got " + std::to_string(wrong));
      });
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::test
