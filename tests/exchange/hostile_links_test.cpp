// Links between whose ranks somebody else is: strangers at the ports, and addresses, ports and secrets that are wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "exchange/hostile.h"
#include "exchange/linked.h"
#include "support/attack.h"

namespace nvfp4_moe {
namespace {

using test::attacked;
using test::Bytes;
using test::expect_none;
using test::LinkHost;
using test::on_its_own_host;
using test::on_linked;
using ::testing::HasSubstr;

// Of an offer: 16 bytes of secret, the port, and addresses of 64 bytes.
constexpr size_t kPortAt = 16, kAddressesAt = 20, kAddressBytes = 64, kOfferAddresses = 8;

int port_of(const std::byte* offer) {
  int32_t port = 0;
  std::memcpy(&port, offer + kPortAt, sizeof(port));
  return port;
}
void set_address(std::byte* offer, size_t number, const std::string& address) {
  std::byte* const at = offer + kAddressesAt + number * kAddressBytes;
  std::memset(at, 0, kAddressBytes);
  std::memcpy(at, address.data(), address.size());
}

// What a rank says first, with a secret: the one that the offer has, or none.
Bytes greeting(const std::byte* offer, int rank, bool knows_the_secret) {
  const uint64_t magic = 0x314b4e4c34504656;
  const int32_t words[] = {1, rank};
  Bytes bytes(32);
  std::memcpy(bytes.data(), &magic, sizeof(magic));
  std::memcpy(bytes.data() + 8, words, sizeof(words));
  if (knows_the_secret) std::memcpy(bytes.data() + 16, offer, 16);
  return bytes;
}

// Before any rank: each rank's port is known to whoever reads what the host's functions carry.
ATTACK_TEST(kHostilePeers, HostileLinks, StrangersAreSentAwayAndRanksAreLinked) {
  std::vector<Socket> strangers[3];
  on_linked(
      3,
      [&](int rank, LinkHost& host) {
        host.on_offer = [&, rank](int from, std::byte* offer) {
          const Bytes noise(200, std::byte{'x'}), silence;
          Bytes half = greeting(offer, rank, true);
          half.resize(20);
          for (const Bytes& words :
               {silence, noise, half, greeting(offer, rank, false), greeting(offer, from, true),
                greeting(offer, 3, true), greeting(offer, -1, true), greeting(offer, INT32_MIN, true)}) {
            attacked();
            auto stranger = connect_to("127.0.0.1", port_of(offer), Deadline(test::kLong));
            ASSERT_OK(stranger);
            EXPECT_TRUE(write_all(*stranger, words, Deadline(test::kLong)));
            strangers[rank].push_back(std::move(*stranger));
          }
        };
        return LinkOptions{};
      },
      [&](Exchange& exchange, LinkHost& host) {
        EXPECT_EQ(host.offers, 1);
        EXPECT_OK(exchange.sees_ends());
        EXPECT_OK(exchange.barrier());
        EXPECT_OK(exchange.look());
        EXPECT_OK(exchange.barrier());
        for (const Socket& stranger : strangers[exchange.rank()]) {
          std::byte word{};
          EXPECT_FALSE(read_all(stranger, {&word, 1}, Deadline(test::kLong)));
          EXPECT_TRUE(has_ended(stranger));
        }
      });
}

// The first addresses lead nowhere, or to somebody else: the next one is taken.
ATTACK_TEST(kHostilePeers, HostileLinks, AnAddressOfSomebodyElseIsPassedOver) {
  const std::vector<std::string> own = host_addresses(1);
  if (own.empty()) GTEST_SKIP() << "this host has no address but loopback";
  for (const char* const first : {"127.0.0.2", "198.51.100.7", "not an address", ""}) {
    attacked();
    const bool none = std::strlen(first) == 0;
    const auto change = [&](int rank, LinkHost& host) {
      host.on_offer = [&](int, std::byte* offer) {
        for (size_t number = 0; number < kOfferAddresses; ++number) set_address(offer, number, "");
        set_address(offer, 0, first);
        set_address(offer, 1, none ? "" : own[0]);
      };
      return on_its_own_host(rank);
    };
    if (none) {
      expect_none(2, change, HasSubstr("rank 0: links: expected a connection with rank 1, got none: no address"));
    } else {
      on_linked(2, change, [](Exchange& exchange, LinkHost&) { EXPECT_OK(exchange.sees_ends()); });
    }
  }
}

// A listener in a rank's place, which answers with other bytes, before it is asked.
ATTACK_TEST(kHostilePeers, HostileLinks, SomebodyElseInARanksPlaceIsNotThatRank) {
  const auto listener = listen_on("127.0.0.1", 0);
  ASSERT_OK(listener);
  for (const size_t answer_bytes : {size_t{0}, size_t{31}, size_t{32}, size_t{4096}}) {
    attacked();
    std::vector<Socket> taken;
    const auto change = [&](int rank, LinkHost& host) {
      host.on_offer = [&, rank](int, std::byte* offer) {
        if (rank != 0) return;
        const auto port = static_cast<int32_t>(*local_port(*listener));
        std::memcpy(offer + kPortAt, &port, sizeof(port));
      };
      return LinkOptions{true, Timeout{700}, ""};
    };
    std::atomic<bool> over{false};
    std::thread somebody([&] {
      const Bytes words(answer_bytes, std::byte{'y'});
      while (!over) {
        auto socket = accept_from(*listener);
        if (socket.ok() && socket->open()) {
          write_all(*socket, words, Deadline(test::kLong));
          taken.push_back(std::move(*socket));
        }
        std::this_thread::sleep_for(Timeout{1});
      }
    });
    on_linked(2, change, [&](Exchange& exchange, LinkHost&) {
      EXPECT_THAT(
          exchange.sees_ends().message(),
          HasSubstr(answer_bytes < 32 ? "rank 0: links: expected connections within 700 ms, got none with rank 1"
                                      : "it is not that rank"));
      EXPECT_OK(exchange.barrier());
      EXPECT_OK(exchange.look());
      EXPECT_OK(exchange.barrier());
    });
    over = true;
    somebody.join();
  }
}

// One byte of an offer at a time: whatever comes of it, both ranks say the same of it and go on.
ATTACK_TEST(kHostilePeers, HostileLinks, AnyByteOfAnOfferThatIsWrongLeavesAnExchange) {
  for (size_t at = 0; at < kAddressesAt + 16; ++at) {
    attacked();
    std::array<std::string, 2> said;
    on_linked(
        2,
        [&](int rank, LinkHost& host) {
          host.on_offer = [&, rank](int, std::byte* offer) {
            if (rank == 0) offer[at] ^= std::byte{0x5A};
          };
          return LinkOptions{true, Timeout{150}, ""};
        },
        [&](Exchange& exchange, LinkHost&) {
          said[static_cast<size_t>(exchange.rank())] = exchange.sees_ends().message();
          test::expect_said(exchange.sees_ends());
          EXPECT_OK(exchange.barrier());
          EXPECT_OK(exchange.look());
          EXPECT_OK(exchange.barrier());
        });
    EXPECT_EQ(said[0], said[1]);
    if (at < kPortAt + 2) {  // the secret and the port
      EXPECT_THAT(said[0], HasSubstr("links: expected")) << at;
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe
