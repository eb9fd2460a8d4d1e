// Several streams on one layer, and weights replaced in place while others run.
#include <atomic>
#include <chrono>
#include <thread>

#include "moe/tiny.h"
#include "moe/weight_uses.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

TEST(Concurrency, StreamsWithTheirOwnWorkspacesGiveTheSameBits) {
  const TinyLayer tiny;
  for (const Backend* backend : runnable_backends()) {
    const auto pool = make_thread_pool(2);
    LayerOptions options = tiny_layer_options();
    options.executor = pool.get();
    const auto opened = open_tiny(tiny, options, backend);
    const MoeLayer& layer = *opened;
    TinyBatch first(tiny.options, 9, 1), second(tiny.options, 16, 2);
    const std::vector<float> expected[2] = {run_tiny(layer, first), run_tiny(layer, second)};

    std::atomic<int> failures{0};
    const auto stream = [&](uint32_t seed, int64_t tokens) {
      TinyBatch batch(tiny.options, tokens, seed);
      const Buffer workspace = workspace_of(layer);
      for (int i = 0; i < 50; ++i) {
        batch.out.assign(batch.out.size(), -1.0f);
        if (!run_in(workspace, layer, batch.batch()).ok() ||
            !same_bits(batch.out, expected[seed - 1]))
          ++failures;
      }
    };
    std::thread one(stream, 1, 9), two(stream, 2, 16);
    one.join();
    two.join();
    EXPECT_EQ(failures.load(), 0) << backend->name;
  }
}

TEST(Replace, IsByteIdenticalToAFreshLoad) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const TinyLayer before(options, 7), after(options, 8);
  for (const Backend* backend : runnable_backends()) {
    const auto changed = open_tiny(before, tiny_layer_options(), backend);
    const auto fresh = open_tiny(after, tiny_layer_options(), backend);
    const std::byte* place = changed->weights().bytes.data();
    for (int64_t e = 0; e < 4; ++e)
      ASSERT_OK(changed->replace_expert(e, after.experts[static_cast<size_t>(e)].source()));
    ASSERT_OK(changed->replace_expert(kSharedExpert, after.shared[0].source()));
    const PackedWeights &a = changed->weights(), &b = fresh->weights();
    EXPECT_EQ(a.bytes.data(), place);
    ASSERT_EQ(a.bytes.size_bytes(), b.bytes.size_bytes());
    EXPECT_EQ(std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size_bytes()), 0)
        << backend->name;
    EXPECT_EQ(a.tensor_scales, b.tensor_scales);
    TinyBatch batch(options, 5);
    EXPECT_TRUE(same_bits(run_tiny(*changed, batch), run_tiny(*fresh, batch)));
  }
}

TEST(Replace, IsRefusedWhileARunIsInFlight) {
  const TinyLayer tiny;
  Interrupting executor;
  LayerOptions options = tiny_layer_options();
  options.executor = &executor;
  const auto opened = open_tiny(tiny, options);
  MoeLayer& layer = *opened;
  TinyBatch batch(tiny.options, 4);
  const std::vector<float> expected = run_tiny(layer, batch);
  Status during, unpacked;
  executor.in_the_middle = [&] {
    during = layer.replace_expert(0, tiny.experts[1].source());
    ExpertBuffers buffers;
    unpacked = layer.unpack_expert(0, buffers);
  };
  EXPECT_TRUE(same_bits(run_tiny(layer, batch), expected));
  EXPECT_EQ(during.code(), Code::kBusy);
  EXPECT_OK(unpacked);
  EXPECT_OK(layer.replace_expert(0, tiny.experts[1].source()));  // idle again
  EXPECT_FALSE(same_bits(run_tiny(layer, batch), expected));
}

// Even if an expert is replaced meanwhile, its codes and tensor scales are of one version. Large
// enough for a replacement to end while arrays are copied out.
TEST(Replace, UnpackGivesOneExpertWhole) {
  MoeOptions options = tiny_options();
  options.hidden_size = options.intermediate_size = 512;
  const TinyLayer tiny(options);
  const auto layer = open_tiny(tiny);
  Expert scaled = tiny.experts[0];
  for (Matrix* m : {&scaled.gate, &scaled.up, &scaled.down}) {
    for (uint8_t& byte : m->codes) byte ^= 0x11;
    m->tensor_scale *= 2;
  }
  const Expert* const experts[] = {&tiny.experts[0], &scaled};
  std::atomic<bool> stop{false};
  std::atomic<int> replaced{0};
  std::thread writer([&] {
    for (size_t i = 1; !stop; ++i) {
      const Status status = layer->replace_expert(0, experts[i % 2]->source());
      EXPECT_TRUE(status.ok() || status.code() == Code::kBusy) << status.message();
      replaced += status.ok();
      std::this_thread::yield();
    }
  });
  int mixed = 0, read = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while ((read < 500 || replaced < 500) && std::chrono::steady_clock::now() < deadline) {
    ExpertBuffers out;
    const Status status = layer->unpack_expert(0, out);
    EXPECT_TRUE(status.ok() || status.code() == Code::kBusy) << status.message();
    if (!status.ok()) continue;
    ++read;
    const Expert& expert = out.gate.codes == experts[0]->gate.codes ? *experts[0] : *experts[1];
    mixed += out.gate.codes != expert.gate.codes || out.down.codes != expert.down.codes ||
             out.scales.down != expert.down.tensor_scale ||
             out.scales.gate != expert.gate.tensor_scale;
  }
  stop = true;
  writer.join();
  EXPECT_EQ(mixed, 0) << read << " were read";
  EXPECT_GT(read, 0);
  EXPECT_GT(replaced.load(), 0);
}

TEST(Replace, ABadExpertOrStreamChangesNothing) {
  const TinyLayer tiny;
  const auto layer = open_tiny(tiny);
  TinyBatch batch(tiny.options, 4);
  const std::vector<float> expected = run_tiny(*layer, batch);
  Expert bad = tiny.experts[1];
  bad.down.block_scales.back() = 0xFF;
  EXPECT_EQ(layer->replace_expert(0, bad.source()).code(), Code::kBadInput);
  const ExpertSource good = tiny.experts[1].source();
  ExpertBuffers buffers;
  for (const int64_t none : {int64_t{4}, int64_t{-2}, int64_t{kSharedExpert}}) {
    EXPECT_EQ(layer->replace_expert(none, good).code(), Code::kInvalidArgument);
    EXPECT_EQ(layer->unpack_expert(none, buffers).code(), Code::kInvalidArgument);
  }
  EXPECT_THAT(layer->replace_expert_on_stream(0, good, nullptr),
              Refused(Code::kInvalidArgument, "expected no stream"));
  EXPECT_TRUE(same_bits(run_tiny(*layer, batch), expected));
}

// If the threads' uses overlap without end, there is no moment without a use.
TEST(Replace, UsesAreHeldOffForAReplacementThatWaits) {
  WeightUses uses;
  std::atomic<bool> stop{false};
  std::atomic<int> counted{0};
  std::vector<std::thread> runs;
  for (int i = 0; i < 3; ++i)
    runs.emplace_back([&, i] {
      while (!stop) {
        const WeightUses::Use use(uses);
        const WeightUses::Use within(uses);  // a run over ranks has one within its own
        counted += use && within;
        std::this_thread::sleep_for(std::chrono::microseconds(500 + 100 * i));
      }
    });
  while (counted < 30) std::this_thread::yield();
  int begun = 0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const WeightUses::HoldOff hold_off(uses);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (std::chrono::steady_clock::now() < until) {
      const WeightUses::Replacement replacement(uses, true);
      if (replacement) ++begun;
      if (replacement) break;
      std::this_thread::yield();
    }
  }
  stop = true;
  for (std::thread& run : runs) run.join();
  EXPECT_EQ(begun, 20);
}

// A run that begins during the single launch of a replacement on a stream is not refused.
TEST(Replace, UsesWaitForAReplacementThatIsOnlyEnqueued) {
  WeightUses uses;
  std::atomic<int> begun{0};
  std::thread run;
  {
    const WeightUses::Replacement enqueued(uses, true);
    ASSERT_TRUE(enqueued);
    EXPECT_EQ(WeightUses::Replacement(uses).in_flight(), -1);
    run = std::thread([&] { begun = WeightUses::Use(uses) ? 1 : -1; });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(begun, 0);
  }
  run.join();
  EXPECT_EQ(begun, 1);
  const WeightUses::Replacement written(uses);
  ASSERT_TRUE(written);
  EXPECT_FALSE(WeightUses::Use(uses));
}

}  // namespace
}  // namespace nvfp4_moe::internal
