// Peers that say anything but what a rank says: a rank's own bytes, changed, cut, stopped or followed by others.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/random.h"
#include "exchange/hostile.h"
#include "support/attack.h"

namespace nvfp4_moe::test {
namespace {

using testing::HasSubstr;

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
    const Status status =
        talk_with(Bytes(valid().begin(), valid().begin() + static_cast<std::ptrdiff_t>(end)), Then::kGoes);
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
  constexpr int64_t kLoose =
      20;  // what is behind the end of the last operation's name, and a barrier's byte, may be any
  Random random(3);
  for (int run = 0; run < 500; ++run) {
    attacked();
    Bytes bytes(static_cast<size_t>(random.below(3000)));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    // Behind a beginning that is a rank's, at times.
    if (run % 2 == 0)
      bytes.insert(bytes.begin(), valid().begin(), valid().begin() + random.below(std::ssize(valid()) - kLoose));
    EXPECT_FALSE(talk_with(bytes, Then::kGoes).ok());
  }
}

// A header that says why a rank has left, with codes that are none: kOk would be taken for a rank that goes on.
ATTACK_TEST(kHostilePeers, HostilePeers, AFailureIsOneWhateverItsCode) {
  struct Abort {
    uint32_t kind = 3, code = 0;
    int64_t bytes = 0, expects = 0;
    char what[16] = {};
    uint64_t balance = 0;
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

}  // namespace
}  // namespace nvfp4_moe::test
