// Sizes that do not fit are refused on all ranks, whoever sees them and whenever its headers come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>
#include <utility>
#include <vector>

#include "exchange/ranks.h"

namespace nvfp4_moe {
namespace {

using test::kLong;
using test::on_threads;
using ::testing::HasSubstr;

// Copies what comes on each connection to the other one until one of them ends; waits a moment whenever `holds` is set.
void forward(const Socket& first, const Socket& second, std::atomic<bool>& holds) {
  std::array<std::byte, 4096> some;
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(holds.exchange(false) ? 300 : 1));
    for (const auto& [from, to] : {std::pair(&first, &second), std::pair(&second, &first)}) {
      const Movement read = read_some(*from, some);
      if (read.moved == Moved::kEnded) return;
      write_all(*to, std::span(some).first(read.bytes), Deadline(kLong));
    }
  }
}

// Rank 2 has all that it asks for, and each of the others has seen its header, before those two see each other's.
TEST(Tcp, ARankThatHasAllItAskedForHearsThatTwoOthersDisagree) {
  test::Pair with_0 = test::socket_pair(), with_1 = test::socket_pair(), first = test::socket_pair(),
             second = test::socket_pair();
  std::atomic<bool> holds{false};
  std::thread slow([&] {
    forward(first.other, second.other, holds);
    first.other.close(), second.other.close();
  });
  std::vector<std::vector<Socket>> peers(3);
  for (auto& of_rank : peers) of_rank.resize(3);
  peers[0][1] = std::move(first.mine), peers[1][0] = std::move(second.mine);
  peers[0][2] = std::move(with_0.mine), peers[2][0] = std::move(with_0.other);
  peers[1][2] = std::move(with_1.mine), peers[2][1] = std::move(with_1.other);
  std::latch all_through(3), all_here(3);
  on_threads(3, [&](int rank) {
    const auto exchange = connect_peers(std::move(peers[static_cast<size_t>(rank)]), rank, kLong);
    EXPECT_OK(exchange);
    EXPECT_OK((*exchange)->barrier());
    all_through.arrive_and_wait();
    if (rank == 2) holds = true;
    all_here.arrive_and_wait();
    std::vector<int64_t> send(3), recv(3);
    if (rank == 0) send[1] = 8;
    if (rank == 1) recv[0] = 12;
    const std::vector<std::byte> from(16);
    std::vector<std::byte> to(16);
    const Status status = (*exchange)->all_to_all_v(from.data(), send, to.data(), recv);
    EXPECT_THAT(status.message(), HasSubstr("rank 1 expected 12 bytes from rank 0, which sends 8")) << "rank " << rank;
  });
  slow.join();
}

}  // namespace
}  // namespace nvfp4_moe
