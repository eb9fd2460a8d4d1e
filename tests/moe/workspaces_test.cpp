// Workspaces: the pool has one per stream if runs follow each other and one per run if they
// overlap, and allocates nothing once the largest exists. Also the cached sizes, and claims, one
// per run.
#include "moe/workspaces.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "backend/layer_steps.h"
#include "moe/c_layer.h"
#include "moe/linear.h"
#include "support/backends.h"
#include "support/forked_child.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

// The number of allocations, the bytes in use, and their maximum.
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
  { ASSERT_OK(pool.lease(1 << 20)); }  // outgrown: the small one is freed
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

// A workspace captured in a graph stays the graph's: no run outside gets it, and growing does not
// free it.
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
  EXPECT_EQ(static_cast<const uint8_t*>(captured)[999],
            1);  // still there, under AddressSanitizer too
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
    { ASSERT_OK(pool.lease(400, nullptr, 7)); }  // outgrows the capture's first one, which is kept
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
  EXPECT_EQ(living, 0u);  // the outgrown one was freed to make room
  refuses = false;
  ASSERT_OK(pool.lease(2000));
  EXPECT_EQ(living, 2000u);
}

TEST_F(WorkspacePools, ThreadsNeverHoldTheSameBytes) {
  WorkspacePool pool(
      [](size_t size_bytes, void*) { return allocate_host(size_bytes, 0, "workspace"); });
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

// ---- WorkspaceSizeCache: when it computes again, and that no thread gets the size of another
// token count

TEST(WorkspaceSizeCache, ComputesOnceForACountThatIsAskedForAgain) {
  WorkspaceSizeCache last;
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

// A size too large to be stored together with its token count is right too, and hides no other.
TEST(WorkspaceSizeCache, LargeSizesAndCountsAreExact) {
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  constexpr size_t kLimit = size_t{1} << 33;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, kMostTokens - 1, kMostTokens})
    for (const size_t size :
         {size_t{0}, kLimit - 1, kLimit, kLimit + 5, std::numeric_limits<size_t>::max()}) {
      const WorkspaceSizeCache last;
      for (int again = 0; again < 2; ++again)
        EXPECT_EQ(last.get(tokens, [&](int64_t) { return size; }), size);
    }
}

TEST(WorkspaceSizeCache, ThreadsGetTheSizeOfTheirOwnCount) {
  WorkspaceSizeCache last;
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

// ---- WorkspaceClaim: two runs in one workspace are refused, for any contents of it, and a claim
// ends with its run

using namespace test;

const void* address(uint64_t number) {
  return reinterpret_cast<const void*>(number * Arena::kAlignment);
}

TEST(WorkspaceClaim, OneOfTheSameAddressAtATime) {
  {
    const WorkspaceClaim first(address(1000)), other(address(1001));
    EXPECT_TRUE(first);
    EXPECT_TRUE(other);
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(WorkspaceClaim(address(1000)));
  }
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(WorkspaceClaim(address(1000)));
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(WorkspaceClaim(nullptr));
}

// More than the table holds: a workspace in the table is refused a second claim, the others are let
// through.
TEST(WorkspaceClaim, AFullTableRefusesNobodyElse) {
  std::vector<std::unique_ptr<WorkspaceClaim>> claims;
  for (uint64_t i = 1; i <= 5000; ++i) {
    claims.push_back(std::make_unique<WorkspaceClaim>(address(i)));
    EXPECT_TRUE(*claims.back());
  }
  EXPECT_FALSE(WorkspaceClaim(address(1)));
  claims.clear();
  for (uint64_t i = 1; i <= 5000; ++i) EXPECT_TRUE(WorkspaceClaim(address(i)));
}

TEST(WorkspaceClaim, OfSeveralThreadsAtMostOneHasIt) {
  std::atomic<int> inside{0}, together{0}, granted{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        const WorkspaceClaim claim(address(5));
        if (!claim) continue;
        ++granted;
        if (++inside != 1) ++together;
        --inside;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(together, 0);
  EXPECT_GT(granted, 0);
  EXPECT_TRUE(WorkspaceClaim(address(5)));
}

ATTACK_TEST(kForks, WorkspaceClaim, AChildHasNoneOfItsParents) {
  const WorkspaceClaim claim(address(9));
  EXPECT_EQ(in_forked_child([] {
              const WorkspaceClaim own(address(9));
              return own && !WorkspaceClaim(address(9)) ? 0 : 1;
            }),
            0);
  EXPECT_FALSE(WorkspaceClaim(address(9)));
}

TEST(WorkspaceClaim, ASecondRunInOneWorkspaceIsBusyAndDisturbsNothing) {
  const TinyLayer tiny;
  for (const Backend* backend : runnable_backends()) {
    Interrupting executor;
    LayerOptions options = tiny_layer_options();
    options.executor = &executor;
    const auto layer = open_tiny(tiny, options, backend);
    const auto other = open_tiny(tiny, tiny_layer_options(), backend);
    TinyBatch batch(tiny.options, 9), second(tiny.options, 5, 4);
    const std::vector<float> expected = run_tiny(*layer, batch), untouched = second.out;
    const Buffer workspace = workspace_of(*layer);
    std::memset(workspace.data(), 0xFF, workspace.size_bytes());  // never initialized
    Status refused, none_refused;
    executor.in_the_middle = [&] {
      refused = run_in(workspace, *other, second.batch());
      Batch none = second.batch();  // has no tokens, but still writes counts and offsets
      none.tokens = 0;
      none_refused = run_in(workspace, *other, none);
    };
    EXPECT_OK(run_in(workspace, *layer, batch.batch()));
    EXPECT_EQ(refused.code(), Code::kBusy) << backend->name;
    EXPECT_EQ(none_refused.code(), Code::kBusy) << backend->name;
    EXPECT_TRUE(same_bits(second.out, untouched));
    EXPECT_TRUE(same_bits(batch.out, expected));
    EXPECT_OK(run_in(workspace, *other, second.batch()));
  }
}

TEST(WorkspaceClaim, ALinearsWorkspaceIsWatchedToo) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(32, 64, 0.01f, random);
  Interrupting executor;
  LinearOptions options{.max_tokens = 4, .executor = &executor};
  const auto linear = NvfpLinear::open(weight.view(), options).value();
  const Buffer workspace = allocate_pages(linear->workspace_bytes()).value();
  std::vector<float> x(4 * 64, 1.0f), out(4 * 32), other(4 * 32);
  const LinearBatch batch{4, x.data(), DType::kF32, out.data(), DType::kF32};
  LinearBatch second = batch;
  second.out = other.data();
  Status refused;
  executor.in_the_middle = [&] {
    refused = linear->run(second, workspace.data(), workspace.size_bytes());
  };
  EXPECT_OK(linear->run(batch, workspace.data(), workspace.size_bytes()));
  EXPECT_EQ(refused.code(), Code::kBusy);
  EXPECT_OK(linear->run(second, workspace.data(), workspace.size_bytes()));
}

}  // namespace
}  // namespace nvfp4_moe::internal
