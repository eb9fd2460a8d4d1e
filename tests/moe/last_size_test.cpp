// LastSize: what is computed again and what is not, and that no thread is given the size of another token count.
#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "moe/workspaces.h"

namespace nvfp4_moe::internal {
namespace {

TEST(LastSize, ComputesOnceForACountThatIsAskedForAgain) {
  LastSize last;
  int computed = 0;
  const auto size_of = [&](int64_t tokens) {
    ++computed;
    return static_cast<size_t>(1000 + tokens);
  };
  EXPECT_EQ(last.get(0, size_of), 1000u);
  EXPECT_EQ(last.get(0, size_of), 1000u);
  EXPECT_EQ(computed, 1);
  EXPECT_EQ(last.get(7, size_of), 1007u);
  EXPECT_EQ(last.get(7, size_of), 1007u);
  EXPECT_EQ(last.get(0, size_of), 1000u);
  EXPECT_EQ(computed, 3);
}

// A size that does not fit beside its token count is right too, and hides no other.
TEST(LastSize, LargeSizesAndCountsAreExact) {
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  constexpr size_t kLimit = size_t{1} << 33;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, kMostTokens - 1, kMostTokens})
    for (const size_t size : {size_t{0}, kLimit - 1, kLimit, kLimit + 5, std::numeric_limits<size_t>::max()}) {
      const LastSize last;
      for (int again = 0; again < 2; ++again) EXPECT_EQ(last.get(tokens, [&](int64_t) { return size; }), size);
    }
}

TEST(LastSize, ThreadsGetTheSizeOfTheirOwnCount) {
  LastSize last;
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20000; ++i)
        if (last.get(t, [](int64_t tokens) { return static_cast<size_t>(tokens) * 4099; }) !=
            static_cast<size_t>(t) * 4099)
          ++wrong[static_cast<size_t>(t)];
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace nvfp4_moe::internal
