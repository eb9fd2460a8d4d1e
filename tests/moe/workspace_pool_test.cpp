// WorkspacePool: one workspace per stream where runs follow each other, one each where they overlap, and no allocation
// once the largest is there.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "backend/layer_steps.h"
#include "moe/workspaces.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

// Allocations, the bytes that live, and the most that ever did.
std::atomic<int> allocations{0};
std::atomic<size_t> living{0}, most{0};
Result<Buffer> counted(size_t size_bytes, void*) {
  ++allocations;
  living += size_bytes;
  if (living > most) most = living.load();
  auto* const bytes = new (std::align_val_t{256}) std::byte[size_bytes];
  return Buffer(bytes, size_bytes, [](std::byte* data, size_t size) {
    living -= size;
    ::operator delete[](data, std::align_val_t{256});
  });
}

class WorkspacePools : public ::testing::Test {
 protected:
  void SetUp() override {
    allocations = 0;
    living = most = 0;
  }
};

TEST_F(WorkspacePools, OneWorkspaceServesAllThatFollowEachOther) {
  WorkspacePool pool(counted);
  const void* first = nullptr;
  for (const size_t size_bytes : {5000u, 100u, 5000u, 0u}) {
    const auto lease = pool.lease(size_bytes);
    ASSERT_OK(lease);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(lease->data()) % 256, 0u);
    EXPECT_GE(lease->size_bytes(), size_bytes);
    if (first == nullptr) first = lease->data();
    EXPECT_EQ(lease->data(), first);
  }
  EXPECT_EQ(allocations, 1);
  { ASSERT_OK(pool.lease(1 << 20)); }  // outgrown: the small one goes
  EXPECT_EQ(allocations, 2);
  EXPECT_EQ(living, size_t{1} << 20);
}

TEST_F(WorkspacePools, LeasesThatOverlapAndStreamsDoNotShare) {
  WorkspacePool pool(counted);
  int stream = 0;
  {
    const auto a = pool.lease(1000), b = pool.lease(1000), c = pool.lease(1000, &stream);
    ASSERT_OK(a);
    ASSERT_OK(b);
    ASSERT_OK(c);
    EXPECT_NE(a->data(), b->data());
    EXPECT_NE(a->data(), c->data());
    EXPECT_NE(b->data(), c->data());
  }
  const auto again = pool.lease(1000, &stream);
  ASSERT_OK(again);
  EXPECT_EQ(allocations, 3);
}

TEST_F(WorkspacePools, TheLargestFreeOneIsTaken) {
  WorkspacePool pool(counted);
  {
    const auto small = pool.lease(100), large = pool.lease(10000);
    ASSERT_OK(small);
    ASSERT_OK(large);
  }
  EXPECT_GE(pool.lease(5000)->size_bytes(), 10000u);
  EXPECT_EQ(allocations, 2);
}

// What a graph was captured with stays its own: no run outside gets it, and growing does not free it.
TEST_F(WorkspacePools, CapturesKeepTheirWorkspaces) {
  WorkspacePool pool(counted);
  const void* captured = nullptr;
  {
    const auto lease = pool.lease(1000, nullptr, 7);
    ASSERT_OK(lease);
    captured = lease->data();
    std::memset(lease->data(), 1, 1000);
  }
  EXPECT_EQ(pool.lease(900, nullptr, 7)->data(), captured);
  EXPECT_NE(pool.lease(900, nullptr, 8)->data(), captured);
  EXPECT_NE(pool.lease(900)->data(), captured);
  EXPECT_NE(pool.lease(5000, nullptr, 7)->data(), captured);
  EXPECT_EQ(allocations, 4);
  EXPECT_EQ(static_cast<const uint8_t*>(captured)[999], 1);  // still there, under AddressSanitizer too
  EXPECT_EQ(living, 1000u + 900 + 900 + 5000);
}

TEST_F(WorkspacePools, AnOutgrownOneGoesBeforeMoreIsAskedFor) {
  WorkspacePool pool(counted);
  { ASSERT_OK(pool.lease(1000)); }
  { ASSERT_OK(pool.lease(4000)); }
  EXPECT_EQ(most, 4000u);
  EXPECT_EQ(living, 4000u);
}

TEST_F(WorkspacePools, ReleaseGivesBackAllThatNoLeaseHolds) {
  WorkspacePool pool(counted);
  int stream = 0;
  {
    { ASSERT_OK(pool.lease(1000)); }
    { ASSERT_OK(pool.lease(2000, &stream)); }
    { ASSERT_OK(pool.lease(300, nullptr, 7)); }
    { ASSERT_OK(pool.lease(400, nullptr, 7)); }  // outgrows the capture's first one, which stays
    const auto held = pool.lease(50, &stream, 8);
    ASSERT_OK(held);
    EXPECT_EQ(pool.release(), 3700u);
    EXPECT_EQ(living, 50u);
    EXPECT_EQ(pool.release(), 0u);
  }
  EXPECT_EQ(pool.release(), 50u);
  EXPECT_EQ(living, 0u);
  ASSERT_OK(pool.lease(10));  // usable as before
  EXPECT_EQ(living, 10u);
}

TEST_F(WorkspacePools, ItsEndGivesBackAll) {
  {
    WorkspacePool pool(counted);
    { ASSERT_OK(pool.lease(1000)); }
    { ASSERT_OK(pool.lease(300, nullptr, 7)); }
    { ASSERT_OK(pool.lease(400, nullptr, 7)); }
    EXPECT_EQ(living, 1700u);
  }
  EXPECT_EQ(living, 0u);
}

TEST_F(WorkspacePools, ARefusalIsToldAndLeavesThePoolUsable) {
  bool refuses = true;
  WorkspacePool pool([&](size_t size_bytes, void* stream) -> Result<Buffer> {
    if (refuses) return Status(Code::kOutOfMemory, "no memory");
    return counted(size_bytes, stream);
  });
  EXPECT_EQ(pool.lease(1).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(living, 0u);
  refuses = false;
  { ASSERT_OK(pool.lease(1000)); }
  refuses = true;
  EXPECT_EQ(pool.lease(2000).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(living, 0u);  // the outgrown one went to make room
  refuses = false;
  ASSERT_OK(pool.lease(2000));
  EXPECT_EQ(living, 2000u);
}

TEST_F(WorkspacePools, ThreadsNeverHoldTheSameBytes) {
  WorkspacePool pool([](size_t size_bytes, void*) { return allocate_host(size_bytes, 0, "workspace"); });
  std::atomic<int> mixed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const auto lease = pool.lease(64);
        auto* bytes = static_cast<std::atomic<int>*>(lease->data());
        bytes->store(t);
        std::this_thread::yield();
        if (bytes->load() != t) ++mixed;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixed, 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal
