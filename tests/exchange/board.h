// Ranks as processes that communicate over memory shared since before their fork.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "exchange/callback.h"

namespace nvfp4_moe::internal::test {

// A block from each rank to each, initially zeros.
class Board {
 public:
  static constexpr int kRanks = 5;
  static constexpr int64_t kBytes = 8192;  // of a block at most
  static std::shared_ptr<Board> make() {
    void* const memory =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    return {static_cast<Board*>(memory), [](Board* board) { ::munmap(board, sizeof(Board)); }};
  }

 private:
  friend class BoardRank;
  struct Block {
    std::atomic<uint32_t> written, read;
    int64_t bytes;
    std::byte data[kBytes];
  };
  Block blocks_[kRanks][kRanks];  // (from, to)
};

// A rank's end of the board: it outlives the rank's exchange.
class BoardRank {
 public:
  BoardRank(std::shared_ptr<Board> board, int rank, int world)
      : board_(std::move(board)), rank_(rank), world_(world) {}
  Result<std::unique_ptr<Exchange>> connect(Timeout timeout) {
    return connect_callbacks({this, all_to_all_v, nullptr}, rank_, world_, timeout);
  }
  std::atomic<bool> fails{false};

 private:
  static int all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                          const int64_t* recv_bytes, int64_t timeout_ms, char* error,
                          size_t error_bytes) {
    auto& self = *static_cast<BoardRank*>(user);
    if (self.fails) return 42;
    const Deadline deadline{Timeout{timeout_ms}};
    const auto wait = [&](int rank, const auto& ready) {
      while (!ready() && !deadline.passed())
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (!ready()) {
        const std::string text = "no bytes of rank " + std::to_string(rank);
        error[text.copy(error, error_bytes - 1)] = 0;
      }
      return ready();
    };
    const auto* from = static_cast<const std::byte*>(send);
    for (int to = 0; to < self.world_; from += send_bytes[to++]) {
      auto& block = self.board_->blocks_[self.rank_][to];
      if (send_bytes[to] > Board::kBytes || !wait(to, [&] { return block.read == block.written; }))
        return 1;
      if (send_bytes[to] > 0) std::memcpy(block.data, from, static_cast<size_t>(send_bytes[to]));
      block.bytes = send_bytes[to];
      ++block.written;
    }
    auto* into = static_cast<std::byte*>(recv);
    for (int source = 0; source < self.world_; into += recv_bytes[source++]) {
      auto& block = self.board_->blocks_[source][self.rank_];
      if (!wait(source, [&] { return block.read != block.written; }) ||
          block.bytes != recv_bytes[source])
        return 1;
      if (block.bytes > 0) std::memcpy(into, block.data, static_cast<size_t>(block.bytes));
      ++block.read;
    }
    return 0;
  }

  const std::shared_ptr<Board> board_;
  const int rank_, world_;
};

}  // namespace nvfp4_moe::internal::test
