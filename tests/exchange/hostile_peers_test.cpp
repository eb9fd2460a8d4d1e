// Peers that say anything but what a rank says: a rank's own bytes, changed, cut, stopped or followed by others; strangers
// where ranks meet; numbers that would place arrays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/random.h"
#include "exchange/ranks.h"
#include "exchange/ranks_progress.h"
#include "moe/announcement.h"
#include "support/attack.h"

namespace nvfp4_moe::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

using Bytes = std::vector<std::byte>;
constexpr Timeout kPeerTimeout{2000};
constexpr const char* kLoopback = "127.0.0.1";

struct Pair {
  Socket mine, other;
};
Pair socket_pair() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  return {Socket(fds[0]), Socket(fds[1])};
}

// What comes of a failure is a text of one line and a code that there is.
void expect_said(const Status& status) {
  EXPECT_GE(status.code(), Code::kOk);
  EXPECT_LE(status.code(), Code::kCancelled);
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
  EXPECT_EQ(status.ok(), status.message().empty()) << status.message();
}

// One call of each kind, as both ranks of a world of two make them; until one fails.
Status talk(Socket peer, int rank, Timeout timeout, std::vector<float>* sum = nullptr) {
  std::vector<Socket> peers(2);
  peers[static_cast<size_t>(1 - rank)] = std::move(peer);
  NVFP4_MOE_ASSIGN(const auto exchange, connect_peers(std::move(peers), rank, timeout));
  NVFP4_MOE_TRY(exchange->agree({}));
  const Status refused = exchange->agree(rank == 1 ? bad_input("no such expert") : Status());
  if (!refused.ok() && refused.message() != "rank 1: no such expert") return refused;
  NVFP4_MOE_TRY(exchange->check_same("config", {{"top_k", "8"}, {"experts", "64"}}));
  std::vector<float> values(33, 1.5f);
  NVFP4_MOE_TRY(exchange->all_reduce(values.data(), 33, DType::kF32));
  if (sum != nullptr) *sum = values;
  const std::vector<int64_t> sizes[2] = {{3, 5}, {7, 2}};  // of rank 0 and 1, for rank 0 and 1
  const std::vector<int64_t>& send = sizes[rank];
  const std::vector<int64_t> recv{sizes[0][static_cast<size_t>(rank)], sizes[1][static_cast<size_t>(rank)]};
  const Bytes from(16, std::byte{7});
  Bytes to(16);
  NVFP4_MOE_TRY(exchange->all_to_all_v(from.data(), send, to.data(), recv));
  NVFP4_MOE_TRY(exchange->look());
  return exchange->barrier();
}

// What rank 1 sends in such a talk.
Bytes recorded() {
  Pair zero = socket_pair(), one = socket_pair();
  Bytes sent;
  std::thread ranks[2] = {std::thread([&] { EXPECT_OK(talk(std::move(zero.mine), 0, kLong)); }),
                          std::thread([&] { EXPECT_OK(talk(std::move(one.mine), 1, kLong)); })};
  // The ends that the ranks have closed end the copying.
  for (int open = 2; open > 0;) {
    pollfd polled[2] = {{one.other.fd(), POLLIN, 0}, {zero.other.fd(), POLLIN, 0}};
    ::poll(polled, 2, 1000);
    for (const auto& [from, to] : {std::pair(&one.other, &zero.other), std::pair(&zero.other, &one.other)}) {
      if (!from->open()) continue;
      Bytes some(4096);
      const Movement read = read_some(*from, some);
      if (read.moved == Moved::kEnded) {
        ::shutdown(to->fd(), SHUT_WR);
        from->close();
        --open;
      }
      some.resize(read.bytes);
      if (!some.empty() && to->open()) write_all(*to, some, Deadline(kPeerTimeout));
      if (from == &one.other) sent.insert(sent.end(), some.begin(), some.end());
    }
  }
  for (std::thread& rank : ranks) rank.join();
  return sent;
}

const Bytes& valid() {
  static const Bytes bytes = recorded();
  return bytes;
}

// Rank 0's talk with a peer that says these bytes, whatever it hears, and then goes or stays.
enum class Then { kGoes, kStays };
Status talk_with(const Bytes& bytes, Then then, Timeout timeout = kPeerTimeout, std::vector<float>* sum = nullptr) {
  Pair pair = socket_pair();
  EXPECT_TRUE(write_all(pair.other, bytes, Deadline(kLong)));
  if (then == Then::kGoes) ::shutdown(pair.other.fd(), SHUT_WR);
  const Status status = talk(std::move(pair.mine), 0, timeout, sum);
  expect_said(status);
  return status;
}

TEST(HostilePeers, ARanksOwnBytesAreHeardFromARecordToo) {
  ASSERT_GT(valid().size(), 1500u);
  std::vector<float> sum;
  EXPECT_OK(talk_with(valid(), Then::kGoes, kPeerTimeout, &sum));
  EXPECT_EQ(sum, std::vector<float>(33, 3.0f));
}

ATTACK_TEST(kHostilePeers, HostilePeers, HalfAMessageIsARankThatLeft) {
  for (size_t end = 0; end < valid().size(); ++end) {
    attacked();
    const Status status = talk_with(Bytes(valid().begin(), valid().begin() + static_cast<std::ptrdiff_t>(end)), Then::kGoes);
    ASSERT_FALSE(status.ok()) << end;
    EXPECT_EQ(status.message(), "exchange: expected rank 1, got none: it has left") << end;
  }
}

ATTACK_TEST(kHostilePeers, HostilePeers, APeerThatStopsIsNamedInTime) {
  for (size_t end = 0; end < valid().size(); end += 199) {
    attacked();
    Status status;
    const double seconds = seconds_of([&] {
      status = talk_with(Bytes(valid().begin(), valid().begin() + static_cast<std::ptrdiff_t>(end)), Then::kStays,
                         Timeout{20});
    });
    EXPECT_THAT(status.message(), HasSubstr("within 20 ms, got none of rank 1")) << end;
    EXPECT_LT(seconds, 3);
  }
}

ATTACK_TEST(kHostilePeers, HostilePeers, AnyChangedByteIsHarmless) {
  for (size_t at = 0; at < valid().size(); ++at)
    for (const int change : {0x01, 0x80, 0xFF}) {
      attacked();
      Bytes bytes = valid();
      bytes[at] ^= static_cast<std::byte>(change);
      (void)talk_with(bytes, Then::kGoes);
    }
}

// Numbers of eight bytes, as sizes, counts and codes are, at every place of the headers and what they announce.
ATTACK_TEST(kHostilePeers, HostilePeers, AnyNumberInItsPlaceIsHarmless) {
  constexpr int64_t kNumbers[] = {0, -1, INT64_MIN, INT64_MAX, int64_t{1} << 40, 3, 1024};
  for (size_t at = 0; at + sizeof(int64_t) <= valid().size(); at += 4)
    for (const int64_t number : kNumbers) {
      attacked();
      Bytes bytes = valid();
      std::memcpy(bytes.data() + at, &number, sizeof(number));
      (void)talk_with(bytes, Then::kGoes);
    }
}

ATTACK_TEST(kHostilePeers, HostilePeers, NoiseIsNoRank) {
  constexpr int64_t kLoose = 20;  // what is behind the end of the last operation's name, and a barrier's byte, may be any
  Random random(3);
  for (int run = 0; run < 500; ++run) {
    attacked();
    Bytes bytes(static_cast<size_t>(random.below(3000)));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    // Behind a beginning that is a rank's, at times.
    if (run % 2 == 0)
      bytes.insert(bytes.begin(), valid().begin(),
                   valid().begin() + random.below(std::ssize(valid()) - kLoose));
    EXPECT_FALSE(talk_with(bytes, Then::kGoes).ok());
  }
}

// A header that says why a rank has left, with codes that are none: kOk would be taken for a rank that goes on.
ATTACK_TEST(kHostilePeers, HostilePeers, AFailureIsOneWhateverItsCode) {
  struct Abort {
    uint32_t kind = 3, code = 0;
    int64_t bytes = 0, expects = 0;
    char what[16] = {};
  };
  const std::string why = "gone\nmad\x1b[31m";
  for (const uint32_t code : {0u, 5u, 9u, 10u, 0x80000000u, 0xFFFFFFFFu})
    for (const int64_t bytes : {int64_t{0}, std::ssize(why), int64_t{-1}, INT64_MAX}) {
      attacked();
      Abort abort;
      abort.code = code;
      abort.bytes = bytes;
      Bytes said(sizeof(abort));
      std::memcpy(said.data(), &abort, sizeof(abort));
      for (const char letter : why) said.push_back(static_cast<std::byte>(letter));
      const Status status = talk_with(said, Then::kGoes);
      ASSERT_FALSE(status.ok());
      if (bytes == std::ssize(why)) {
        EXPECT_THAT(status.message(), HasSubstr("gone\\x0Amad\\x1B[31m")) << status.message();
        EXPECT_EQ(status.code(), code == 5 || code == 9 ? static_cast<Code>(code) : Code::kInternal);
      }
    }
}

// ---- where ranks meet. A greeting as rendezvous.cpp lays it out.

struct Greeting {
  uint64_t magic = 0x3150435434504656;
  int32_t rank = 1, world = 2, port = 1, reserved = 0;
  char address[64] = "127.0.0.1";
};

ATTACK_TEST(kHostilePeers, HostilePeers, StrangersWhereRanksMeetAreSentAway) {
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

ATTACK_TEST(kHostilePeers, HostilePeers, AGreetingOfNoRankEndsTheMeetingByName) {
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
ATTACK_TEST(kHostilePeers, HostilePeers, AnAnswerOfNoRankZeroIsRefused) {
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

ATTACK_TEST(kHostilePeers, HostilePeers, StrangersMoveNoProgress) {
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
    for (int64_t Beat::* const count : {&Beat::done, &Beat::total, &Beat::done_bytes, &Beat::total_bytes})
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

ATTACK_TEST(kHostilePeers, HostilePeers, CountsBelowZeroAreRefusedOnAllRanks) {
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
