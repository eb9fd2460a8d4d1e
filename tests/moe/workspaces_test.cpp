// Workspaces: the pool has one per stream if runs follow each other and one per run if they
// overlap, and allocates nothing once the largest exists. Also the cached sizes, and claims, one
// per run.
#include "moe/workspaces.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "moe/linear.h"
#include "moe/tiny.h"
#include "support/backends.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

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

// Calls body(t) on thread t of four, count times.
template <class Body>
void on_four_threads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < count; ++i) body(t);
    });
  for (std::thread& thread : threads) thread.join();
}

class WorkspacePools : public ::testing::Test {
 protected:
  void SetUp() override {
    allocations = 0;
    living = most = 0;
  }
  // The address of a workspace that is leased and given back.
  const void* leased(size_t size_bytes, void* of_stream = nullptr, uint64_t capture = 0) {
    const auto lease = pool.lease(size_bytes, of_stream, capture);
    EXPECT_OK(lease);
    EXPECT_GE(lease->size_bytes(), size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(lease->data()) % 256, 0u);
    return lease->data();
  }
  WorkspacePool pool{counted};
  int stream = 0;
};

TEST_F(WorkspacePools, OneWorkspaceServesAllThatFollowEachOther) {
  const void* const first = leased(5000);
  for (const size_t size_bytes : {100u, 5000u, 0u}) EXPECT_EQ(leased(size_bytes), first);
  EXPECT_EQ(allocations, 1);
  leased(1 << 20);  // outgrown: the small one is freed, before more is requested
  EXPECT_EQ(allocations, 2);
  EXPECT_EQ(living, size_t{1} << 20);
  EXPECT_EQ(most, size_t{1} << 20);
}

TEST_F(WorkspacePools, LeasesThatOverlapAndStreamsDoNotShare) {
  {
    const auto a = pool.lease(1000), b = pool.lease(1000), c = pool.lease(1000, &stream);
    ASSERT_OK(a);
    ASSERT_OK(b);
    ASSERT_OK(c);
    EXPECT_NE(a->data(), b->data());
    EXPECT_NE(a->data(), c->data());
    EXPECT_NE(b->data(), c->data());
  }
  leased(1000, &stream);
  EXPECT_EQ(allocations, 3);
  {
    const auto small = pool.lease(100), large = pool.lease(10000);
    EXPECT_EQ(allocations, 4);
  }
  EXPECT_GE(pool.lease(500)->size_bytes(), 10000u) << "the largest free one is taken";
}

// A workspace captured in a graph stays the graph's: no run outside gets it, and growing does not
// free it.
TEST_F(WorkspacePools, CapturesKeepTheirWorkspaces) {
  const void* captured = nullptr;
  {
    const auto lease = pool.lease(1000, nullptr, 7);
    ASSERT_OK(lease);
    captured = lease->data();
    std::memset(lease->data(), 1, 1000);
  }
  EXPECT_EQ(leased(900, nullptr, 7), captured);
  EXPECT_NE(leased(900, nullptr, 8), captured);
  EXPECT_NE(leased(900), captured);
  const void* const grown = leased(5000, nullptr, 7);
  EXPECT_NE(grown, captured);
  EXPECT_EQ(leased(900, nullptr, 7), grown) << "the outgrown one is only the graph's";
  EXPECT_EQ(allocations, 4);
  EXPECT_EQ(static_cast<const uint8_t*>(captured)[999], 1);  // there, under AddressSanitizer too
  EXPECT_EQ(living, 1000u + 900 + 900 + 5000);
}

TEST_F(WorkspacePools, ReleaseGivesBackAllThatNoLeaseHolds) {
  leased(1000);
  leased(2000, &stream);
  leased(300, nullptr, 7);
  leased(400, nullptr, 7);  // outgrows the capture's first one, which is kept
  {
    const auto held = pool.lease(50, &stream, 8);
    ASSERT_OK(held);
    EXPECT_EQ(pool.release(), 3700u);
    EXPECT_EQ(living, 50u);
    EXPECT_EQ(pool.release(), 0u);
  }
  EXPECT_EQ(pool.release(), 50u);
  EXPECT_EQ(living, 0u);
  leased(10);  // usable as before
  {
    WorkspacePool other(counted);
    ASSERT_OK(other.lease(300, nullptr, 7));
    ASSERT_OK(other.lease(400, nullptr, 7));
    EXPECT_EQ(living, 710u);
  }
  EXPECT_EQ(living, 10u) << "its end gives back all";
}

TEST_F(WorkspacePools, ARefusalIsToldAndLeavesThePoolUsable) {
  bool refuses = true;
  WorkspacePool refusing([&](size_t size_bytes, void* of_stream) -> Result<Buffer> {
    if (refuses) return Status(Code::kOutOfMemory, "no memory");
    return counted(size_bytes, of_stream);
  });
  EXPECT_EQ(refusing.lease(1).status().code(), Code::kOutOfMemory);
  refuses = false;
  { ASSERT_OK(refusing.lease(1000)); }
  refuses = true;
  EXPECT_EQ(refusing.lease(2000).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(living, 0u);  // the outgrown one was freed to make room
  refuses = false;
  ASSERT_OK(refusing.lease(2000));
}

TEST_F(WorkspacePools, ThreadsNeverHoldTheSameBytes) {
  std::atomic<int> mixed{0};
  on_four_threads(200, [&](int t) {
    const auto lease = pool.lease(64);
    auto* bytes = static_cast<std::atomic<int>*>(lease->data());
    bytes->store(t);
    std::this_thread::yield();
    if (bytes->load() != t) ++mixed;
  });
  EXPECT_EQ(mixed, 0);
}

// ---- WorkspaceSizeCache: when it computes again, and that no thread gets the size of another
// token count

// A size too large to be stored together with its token count is right too, and hides no other.
TEST(WorkspaceSizeCache, ComputesOnceForACountThatIsAskedForAgain) {
  WorkspaceSizeCache last;
  int computed = 0;
  const auto size_of = [&](int64_t tokens) {
    ++computed;
    return static_cast<size_t>(1000 + tokens);
  };
  for (const int64_t tokens : {0, 0, 7, 7, 0})
    EXPECT_EQ(last.get(tokens, size_of), static_cast<size_t>(1000 + tokens));
  EXPECT_EQ(computed, 3);

  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  constexpr size_t kLimit = size_t{1} << 33;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, kMostTokens - 1, kMostTokens})
    for (const size_t size :
         {size_t{0}, kLimit - 1, kLimit, kLimit + 5, std::numeric_limits<size_t>::max()}) {
      const WorkspaceSizeCache large;
      for (int again = 0; again < 2; ++again)
        EXPECT_EQ(large.get(tokens, [&](int64_t) { return size; }), size);
    }
}

TEST(WorkspaceSizeCache, ThreadsGetTheSizeOfTheirOwnCount) {
  WorkspaceSizeCache last;
  std::atomic<int> wrong{0};
  const auto size_of = [](int64_t tokens) { return static_cast<size_t>(tokens) * 4099; };
  on_four_threads(20000, [&](int t) { wrong += last.get(t, size_of) != size_of(t); });
  EXPECT_EQ(wrong, 0);
}

// ---- WorkspaceClaim: two runs in one workspace are refused, for any contents of it, and a claim
// ends with its run

const void* address(uint64_t number) {
  return reinterpret_cast<const void*>(number * Arena::kAlignment);
}

// More than the table holds: a workspace in the table is refused a second claim, the others are let
// through.
TEST(WorkspaceClaim, OneOfTheSameAddressAtATime) {
  std::vector<std::unique_ptr<WorkspaceClaim>> claims;
  for (uint64_t i = 1; i <= 5000; ++i) {
    claims.push_back(std::make_unique<WorkspaceClaim>(address(i)));
    EXPECT_TRUE(*claims.back());
  }
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(WorkspaceClaim(address(1)));
  claims.clear();
  for (uint64_t i = 1; i <= 5000; ++i) EXPECT_TRUE(WorkspaceClaim(address(i)));
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(WorkspaceClaim(nullptr));
}

TEST(WorkspaceClaim, OfSeveralThreadsAtMostOneHasIt) {
  std::atomic<int> inside{0}, together{0}, granted{0};
  on_four_threads(20000, [&](int) {
    const WorkspaceClaim claim(address(5));
    if (!claim) return;
    ++granted;
    if (++inside != 1) ++together;
    --inside;
  });
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
    SCOPED_TRACE(backend->name);
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
    EXPECT_EQ(refused.code(), Code::kBusy);
    EXPECT_EQ(none_refused.code(), Code::kBusy);
    EXPECT_TRUE(same_bits(second.out, untouched));
    EXPECT_TRUE(same_bits(batch.out, expected));
    EXPECT_OK(run_in(workspace, *other, second.batch()));
  }
}

TEST(WorkspaceClaim, ALinearsWorkspaceIsWatchedToo) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(32, 64, 0.01f, random);
  Interrupting executor;
  const auto linear =
      must(NvfpLinear::open(weight.view(), {.max_tokens = 4, .executor = &executor}));
  const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
  std::vector<float> x(4 * 64, 1.0f), out(4 * 32);
  const auto run = [&] {
    return (*linear)->run({4, x.data(), DType::kF32, out.data(), DType::kF32}, workspace.data(),
                          workspace.size_bytes());
  };
  Status refused;
  executor.in_the_middle = [&] { refused = run(); };
  EXPECT_OK(run());
  EXPECT_EQ(refused.code(), Code::kBusy);
  EXPECT_OK(run());
}

}  // namespace
}  // namespace nvfp4_moe::internal
