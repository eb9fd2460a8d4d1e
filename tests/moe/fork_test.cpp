// Layers in a forked child: the parent's own layers run there while its other threads are in the
// middle of calls, and the child opens layers of its own.
#include <atomic>
#include <thread>

#include "moe/env.h"
#include "moe/tiny.h"
#include "moe/workspaces.h"
#include "support/backends.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

ATTACK_TEST(kForks, ForkedChild, RunsChangesAndDropsItsParentsLayer) {
  const TinyLayer tiny;
  for (const Backend* backend : runnable_backends()) {
    ScopedEnv threads("NVFP4_MOE_THREADS", "3");
    LayerOptions options = tiny_layer_options();
    options.executor = nullptr;
    auto layer = open_tiny(tiny, options, backend);
    TinyBatch batch(tiny.options, 9);
    const std::vector<float> expected = run_tiny(*layer, batch);

    std::atomic<bool> stop{false};
    std::atomic<int> running{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 2; ++i)
      callers.emplace_back([&] {
        TinyBatch mine(tiny.options, 9);
        const Buffer workspace = workspace_of(*layer);
        const auto run = [&] {
          EXPECT_OK(layer->run(mine.batch(), workspace.data(), workspace.size_bytes()));
        };
        run();
        ++running;
        while (!stop) run();
      });
    // From here on they allocate nothing: if one of them held the lock of a sanitizer's allocator,
    // the child would hang.
    while (running < 2) std::this_thread::yield();
    for (int fork = 0; fork < 20; ++fork)
      EXPECT_EQ(in_forked_child([&] {
                  if (!same_bits(run_tiny(*layer, batch), expected)) return 1;
                  if (!layer->replace_expert(0, tiny.experts[1].source()).ok())
                    return 2;  // no run is active in the child
                  if (same_bits(run_tiny(*layer, batch), expected)) return 3;
                  layer.reset();
                  if (kThreadSanitizer) return 0;
                  const auto own =
                      MoeLayer::open_on(*backend, tiny.config(), tiny.source(), options);
                  if (!own.ok() || (*own)->executor().threads() != 3) return 4;
                  return same_bits(run_tiny(**own, batch), expected) ? 0 : 5;
                }),
                0)
          << backend->name;
    stop = true;
    for (std::thread& caller : callers) caller.join();
    EXPECT_TRUE(same_bits(run_tiny(*layer, batch), expected));
  }
}

// A replacement writes the codes and scales of one expert or another; a child sees one of them
// whole.
ATTACK_TEST(kForks, ForkedChild, SeesNoExpertThatIsHalfReplaced) {
  MoeOptions large = tiny_options();
  large.hidden_size = large.intermediate_size = 512;
  const TinyLayer tiny(large);
  auto layer = open_tiny(tiny);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (size_t i = 0; !stop; ++i)
      EXPECT_OK(layer->replace_expert(0, tiny.experts[i % 2].source()));
  });
  for (int fork = 0; fork < 20; ++fork)
    EXPECT_EQ(in_forked_child([&] {
                ExpertBuffers now;
                if (!layer->unpack_expert(0, now).ok()) return 1;
                const bool first = now.gate.codes == tiny.experts[0].gate.codes;
                const Expert& expert = tiny.experts[first ? 0 : 1];
                const bool whole = now.gate.codes == expert.gate.codes &&
                                   now.down.codes == expert.down.codes &&
                                   now.up.block_scales == expert.up.block_scales;
                return whole && layer->replace_expert(0, tiny.experts[0].source()).ok() ? 0 : 2;
              }),
              0);
  stop = true;
  writer.join();
}

ATTACK_TEST(kForks, ForkedChild, OfARunFinishesIt) {
  const TinyLayer tiny;
  struct Forking : Executor {
    bool fork_next = false;
    pid_t child = -1;
    void parallel_for(int64_t count, int64_t grain, const Body& body) override {
      if (std::exchange(fork_next, false)) child = fork();
      serial_executor().parallel_for(count, grain, body);
    }
    int threads() const override { return 1; }
  } executor;
  LayerOptions options = tiny_layer_options();
  options.executor = &executor;
  auto layer = open_tiny(tiny, options);
  TinyBatch batch(tiny.options, 9);
  const std::vector<float> expected = run_tiny(*layer, batch);
  executor.fork_next = true;
  attacked();
  const bool right = same_bits(run_tiny(*layer, batch), expected);
  if (executor.child == 0)  // the child returned from the run too, and its use does not count here
    _exit(right && layer->replace_expert(0, tiny.experts[1].source()).ok() ? 0 : 1);
  int status = 0;
  waitpid(executor.child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(right);
  EXPECT_OK(layer->replace_expert(0, tiny.experts[1].source()));
}

ATTACK_TEST(kForks, ForkedChild, GetsTheWorkspacesThatItsParentsThreadsHeld) {
  WorkspacePool pool([](size_t size_bytes, void*) { return allocate_pages(size_bytes); });
  std::atomic<const void*> held{nullptr};
  std::atomic<bool> let_go{false};
  std::thread other([&] {
    const auto lease = pool.lease(1000);
    held = lease->data();
    while (!let_go) std::this_thread::yield();
  });
  while (held == nullptr) std::this_thread::yield();
  const auto mine = pool.lease(1000);
  ASSERT_OK(mine);
  EXPECT_EQ(in_forked_child([&] {
              const auto lease = pool.lease(1000);
              if (!lease.ok() || lease->data() != held) return 1;  // not a third one
              if (lease->data() == mine->data()) return 2;         // which this thread still holds
              return 0;
            }),
            0);
  EXPECT_EQ(pool.release(), 0u);
  let_go = true;
  other.join();
}

ATTACK_TEST(kForks, ForkedChild, LogsWhileItsParentsCallbackHangs) {
  static std::atomic<bool> inside{false}, let_go{false};
  static std::atomic<int> lines{0};
  inside = let_go = false;
  set_log_callback(
      [](int, const char* text, void*) {
        ++lines;
        if (std::string(text) != "hang") return;
        inside = true;
        while (!let_go) std::this_thread::yield();
      },
      nullptr);
  std::thread logging([] { log_line(LogLevel::kError, "hang"); });
  while (!inside) std::this_thread::yield();
  EXPECT_EQ(in_forked_child([] {
              lines = 0;
              log_line(LogLevel::kError, "here");
              set_log_callback(nullptr, nullptr);
              log_line(LogLevel::kError, "to nobody");
              return lines.load();
            }),
            1);
  let_go = true;
  logging.join();
  set_log_callback(nullptr, nullptr);
}

// A layer in a device's memory; the reference backend plays the device.
ATTACK_TEST(kForks, ForkedChild, DeclinesItsParentsLayerOnAGpu) {
  static const DeviceMemory memory{
      .to_device = nullptr,
      .to_host =
          [](int, void* to, const void* from, size_t size_bytes, void*) {
            std::memcpy(to, from, size_bytes);
            return Status();
          },
      .synchronize = [](int) { return Status(); },
      .capture_id = [](void*) -> Result<uint64_t> { return uint64_t{0}; },
      .allocate = nullptr,
      .gather_rows = nullptr,
  };
  Backend device = kReferenceBackend;
  device.memory = &memory;
  const TinyLayer tiny;
  auto layer = open_tiny(tiny, tiny_layer_options(), &device);
  TinyBatch batch(tiny.options, 4);
  const Buffer workspace = workspace_of(*layer);
  const auto calls = [&] {
    ExpertBuffers out;
    return std::vector<Status>{
        layer->run(batch.batch(), workspace.data(), workspace.size_bytes()),
        layer->status(workspace.data(), workspace.size_bytes()).status(),
        layer->replace_expert(0, tiny.experts[0].source()),
        layer->unpack_expert(0, out),
    };
  };
  for (const Status& status : calls()) EXPECT_OK(status);
  EXPECT_EQ(in_forked_child([&] {
              const auto refused = [](const Status& status) {
                return status.code() == Code::kUnsupported &&
                       status.message().find("forked") != std::string::npos;
              };
              for (const Status& status : calls())
                if (!refused(status)) return 1;
              const ExpertSource source = tiny.experts[0].source();
              if (!refused(layer->replace_expert_on_stream(0, source, nullptr))) return 2;
              return refused(layer->warmup(workspace.data(), workspace.size_bytes())) ? 0 : 3;
            }),
            0);
}

}  // namespace
}  // namespace nvfp4_moe::internal
