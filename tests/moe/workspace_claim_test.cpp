// Workspaces in use: two runs in one are refused, whatever its bytes hold, and a claim ends with its run.
#include <thread>

#include "moe/c_layer.h"
#include "moe/linear.h"
#include "moe/workspaces.h"
#include "support/backends.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

const void* address(uint64_t number) { return reinterpret_cast<const void*>(number * Arena::kAlignment); }

TEST(WorkspaceClaim, OneOfTheSameAddressAtATime) {
  const WorkspaceClaim first(address(1000)), other(address(1001));
  EXPECT_TRUE(first);
  EXPECT_TRUE(other);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(WorkspaceClaim(address(1000)));
  EXPECT_TRUE(WorkspaceClaim(nullptr));
  EXPECT_TRUE(WorkspaceClaim(nullptr));
}

TEST(WorkspaceClaim, EndsWithItsScope) {
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(WorkspaceClaim(address(7)));
  {
    const WorkspaceClaim claim(address(7));
    EXPECT_FALSE(WorkspaceClaim(address(7)));
  }
  EXPECT_TRUE(WorkspaceClaim(address(7)));
}

// More than the table holds: what is watched is refused twice, what is not is let through.
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
  for (const Backend* backend : test::runnable_backends()) {
    Interrupting executor;
    LayerOptions options = tiny_layer_options();
    options.executor = &executor;
    const auto layer = MoeLayer::open_on(*backend, tiny.config(), tiny.source(), options).value();
    const auto other = MoeLayer::open_on(*backend, tiny.config(), tiny.source(), tiny_layer_options()).value();
    TinyBatch batch(tiny.options, 9), second(tiny.options, 5, 4);
    const std::vector<float> expected = run_tiny(*layer, batch), untouched = second.out;
    const Buffer workspace = workspace_of(*layer);
    std::memset(workspace.data(), 0xFF, workspace.size_bytes());  // never initialized
    Status refused, none_refused;
    executor.in_the_middle = [&] {
      refused = other->run(second.batch(), workspace.data(), workspace.size_bytes());
      Batch none = second.batch();  // without tokens, which writes counts and offsets all the same
      none.tokens = 0;
      none_refused = other->run(none, workspace.data(), workspace.size_bytes());
    };
    EXPECT_OK(layer->run(batch.batch(), workspace.data(), workspace.size_bytes()));
    EXPECT_EQ(refused.code(), Code::kBusy) << backend->name;
    EXPECT_EQ(none_refused.code(), Code::kBusy) << backend->name;
    EXPECT_TRUE(same_bits(second.out, untouched));
    EXPECT_TRUE(same_bits(batch.out, expected));
    EXPECT_OK(other->run(second.batch(), workspace.data(), workspace.size_bytes()));
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
  executor.in_the_middle = [&] { refused = linear->run(second, workspace.data(), workspace.size_bytes()); };
  EXPECT_OK(linear->run(batch, workspace.data(), workspace.size_bytes()));
  EXPECT_EQ(refused.code(), Code::kBusy);
  EXPECT_OK(linear->run(second, workspace.data(), workspace.size_bytes()));
}

}  // namespace
}  // namespace nvfp4_moe::internal
