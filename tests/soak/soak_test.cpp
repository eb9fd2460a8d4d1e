// Four threads that do to shared layers what a server's threads do over weeks: they load, run,
// replace, unpack and fork, and close layers that others have only just used.
//
// Runs for NVFP4_MOE_SOAK_SECONDS (2); `./dev soak` runs it for an hour under ThreadSanitizer and
// under AddressSanitizer. Every output is compared bit for bit with the right ones. If a thread
// makes no step for two minutes, the process ends and reports the thread's next step.
//
// Long because the threads' steps share one state.
#include <dirent.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <thread>

#include "core/executor.h"
#include "soak/models.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using Clock = std::chrono::steady_clock;

constexpr int kThreads = 4;
constexpr size_t kSlots = 6;
constexpr std::chrono::minutes kHang{2};

// A thread's next action, and its frequency in percent.
enum Action : size_t {
  kRun,
  kShareWorkspace,
  kReplace,
  kRefuse,
  kUnpack,
  kFork,
  kLoad,
  kCancel,
  kDescribe,
  kRepro,
  kForget,
  kActions
};
struct ActionInfo {
  const char* name;
  unsigned weight;
};
constexpr ActionInfo kInfo[kActions] = {
    {"runs", 38},
    {"runs_in_a_shared_workspace", 8},
    {"replacements", 12},
    {"refused_replacements", 4},
    {"unpacked_experts", 12},
    {"forks", 4},
    {"loads", 8},
    {"cancelled_loads", 4},
    {"descriptions", 5},
    {"replays", 3},
    {"deleted_cache_entries", 2},
};

size_t entries_of(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

// A layer in use. The last thread that holds it closes it.
struct OpenLayer {
  const SoakModel* model = nullptr;
  size_t backend = 0;
  nvfp4_moe_layer* handle = nullptr;
  size_t workspace_bytes = 0;

  OpenLayer() = default;
  OpenLayer(const OpenLayer&) = delete;
  OpenLayer& operator=(const OpenLayer&) = delete;
  ~OpenLayer() { nvfp4_moe_layer_close(handle); }
};

class Soak {
 public:
  Soak() {
    models_.emplace_back("plain", tiny_options());
    MoeOptions shared = tiny_options(), on_input = tiny_options(), wide = tiny_options();
    shared.shared_intermediate_size = 32;
    models_.emplace_back("shared expert", shared);
    on_input.top_k = 1;
    models_.emplace_back("on input", on_input, [](nvfp4_moe_config& config) {
      config.router_weight = NVFP4_MOE_ROUTER_WEIGHT_ON_INPUT;
    });
    // large enough for a run to overlap a replacement
    wide.hidden_size = wide.intermediate_size = 256;
    models_.emplace_back("wide", wide);
    models_.emplace_back(NVFP4_MOE_SOURCE_DIR "/tests/vectors/modelopt_qwen3_moe");
  }

  void run(std::chrono::seconds length) {
    std::mt19937 random(0);
    for (Slot& slot : slots_) slot.put(open(random, nullptr));
    const auto end = Clock::now() + length;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; ++i)
      threads.emplace_back([this, i, end] {
        std::mt19937 own(i + 1);
        while (Clock::now() < end) step(i, own);
        done_.fetch_add(1);
      });
    watch();
    for (std::thread& thread : threads) thread.join();
    for (Slot& slot : slots_) slot.put(nullptr);
  }

  uint64_t count(Action action) const { return counts_[action]; }
  uint64_t busy() const { return busy_; }

 private:
  using LayerPtr = std::shared_ptr<const OpenLayer>;
  struct Slot {
    LayerPtr take() {
      const std::lock_guard lock(mutex);
      return layer;
    }
    void put(LayerPtr next) {
      const std::lock_guard lock(mutex);
      layer.swap(next);  // the old layer is closed after the lock, if it is not in use
    }
    std::mutex mutex;
    LayerPtr layer;
  };

  void watch() {
    std::array<uint64_t, kThreads> seen{};
    std::array<Clock::time_point, kThreads> since;
    since.fill(Clock::now());
    while (done_ < kThreads) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (size_t i = 0; i < kThreads; ++i) {
        if (steps_[i] != std::exchange(seen[i], steps_[i])) since[i] = Clock::now();
        if (done_ > 0 || Clock::now() - since[i] < kHang) continue;
        std::fprintf(stderr, "soak: thread %zu hangs in %s\n", i, kInfo[doing_[i]].name);
        std::abort();
      }
    }
  }

  // cancel: nullptr, or the number of the progress report at which to cancel.
  LayerPtr open(std::mt19937& random, int* cancel) {
    auto opened = std::make_shared<OpenLayer>();
    opened->model = &models_[random() % models_.size()];
    opened->backend = random() % std::size(kSoakBackends);
    auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
    options.backend = kSoakBackends[opened->backend];
    options.max_tokens = kSoakMaxTokens;
    options.threads = static_cast<int32_t>(1 + random() % 3);
    options.cache_directory = cache_.c_str();
    if (random() % 3 == 0) {
      options.parallel_for_user = pool_.get();
      options.parallel_for = [](int64_t count, int64_t grain, nvfp4_moe_parallel_body body,
                                void* context, void* user) {
        const auto part = [&](int64_t begin, int64_t end) { body(context, begin, end); };
        static_cast<Executor*>(user)->parallel_for(count, grain, part);
      };
    }
    if (cancel != nullptr) {
      options.progress_user = cancel;
      options.progress = [](const nvfp4_moe_progress*, void* user) {
        return static_cast<int32_t>((*static_cast<int*>(user))-- > 0);
      };
    }
    const nvfp4_moe_status code = opened->model->open(options, &opened->handle);
    if (cancel != nullptr && code == NVFP4_MOE_STATUS_CANCELLED) return nullptr;
    EXPECT_EQ(code, kOk) << opened->model->name() << ": " << nvfp4_moe_last_error();
    if (code != kOk) return nullptr;
    EXPECT_EQ(
        nvfp4_moe_layer_workspace_bytes(opened->handle, kSoakMaxTokens, &opened->workspace_bytes),
        kOk);
    return opened;
  }

  void step(unsigned thread, std::mt19937& random) {
    static const std::vector<Action> drawn = [] {
      std::vector<Action> all;
      for (size_t action = 0; action < kActions; ++action)
        all.insert(all.end(), kInfo[action].weight, static_cast<Action>(action));
      return all;
    }();
    const Action action = drawn[random() % drawn.size()];
    doing_[thread] = action;
    Slot& slot = slots_[random() % kSlots];
    const LayerPtr layer = slot.take();
    const size_t batch = random() % layer->model->batches();
    switch (action) {
      case kRun: run_layer(*layer, batch, nvfp4_moe::Workspace(layer->workspace_bytes)); break;
      // A caller's mistake, which does no damage: the second run gets the status "busy".
      case kShareWorkspace: run_layer(*layer, batch, shared_workspace_); break;
      case kReplace: replace(*layer, layer->model->version(random() % SoakModel::kVersions)); break;
      case kRefuse: replace_by_a_bad_expert(*layer); break;
      case kUnpack: unpack(*layer); break;
      case kFork: fork_child(*layer, batch); break;
      case kLoad:
        if (LayerPtr opened = open(random, nullptr)) slot.put(std::move(opened));
        break;
      case kCancel: {
        int reports = static_cast<int>(random() % 4);  // fewer than a layer has experts
        open(random, &reports);
        break;
      }
      case kDescribe: describe(*layer); break;
      case kRepro: replay(*layer, directory_.file(std::to_string(thread) + ".safetensors")); break;
      case kForget: {  // layers that are mapped from it continue to run
        std::error_code error;
        for (const auto& entry : std::filesystem::directory_iterator(cache_, error))
          if (random() % 2 == 0) std::filesystem::remove(entry.path(), error);
        break;
      }
      case kActions: break;
    }
    ++counts_[action];
    ++steps_[thread];
  }

  // Whether the call succeeded; kBusy is the only other allowed result.
  bool done_or_busy(nvfp4_moe_status code, const OpenLayer& layer) {
    busy_ += code == NVFP4_MOE_STATUS_BUSY;
    EXPECT_TRUE(code == kOk || code == NVFP4_MOE_STATUS_BUSY)
        << layer.model->name() << ": " << nvfp4_moe_last_error();
    return code == kOk;
  }

  void run_layer(const OpenLayer& layer, size_t index, const nvfp4_moe::Workspace& workspace) {
    const SoakModel& model = *layer.model;
    TinyBatch batch = model.batch(index);
    ASSERT_LE(layer.workspace_bytes, workspace.size_bytes());
    const nvfp4_moe_batch c = c_batch(batch);
    void* const bytes = workspace.data();
    if (!done_or_busy(nvfp4_moe_layer_run(layer.handle, &c, bytes, workspace.size_bytes(), nullptr),
                      layer))
      return;
    EXPECT_LT(model.version_of(layer.backend, index, batch.out), SoakModel::kVersions)
        << model.name() << ", batch " << index << ", " << kSoakBackends[layer.backend];
    if (&workspace == &shared_workspace_) return;  // another run may have begun in it
    auto status = nvfp4_moe::make<nvfp4_moe_run_status>();
    EXPECT_EQ(nvfp4_moe_layer_run_status(layer.handle, bytes, workspace.size_bytes(), &status),
              kOk);
    const SoakModel::Right& right = model.right(layer.backend, index, 0);
    EXPECT_EQ(status.bad_expert_ids, right.bad_expert_ids);
    EXPECT_EQ(status.nonfinite_tokens, right.nonfinite_tokens);
  }

  void replace(const OpenLayer& layer, const Expert& version) {
    const nvfp4_moe_expert expert = CLayer::expert(version);
    done_or_busy(nvfp4_moe_layer_replace_expert(layer.handle, 0, &expert), layer);
  }

  static void replace_by_a_bad_expert(const OpenLayer& layer) {
    nvfp4_moe_expert expert = CLayer::expert(layer.model->version(1));
    expert.down_tensor_scale = -1;
    const nvfp4_moe_status code = nvfp4_moe_layer_replace_expert(layer.handle, 0, &expert);
    EXPECT_TRUE(code == NVFP4_MOE_STATUS_BAD_INPUT || code == NVFP4_MOE_STATUS_BUSY) << code;
  }

  void unpack(const OpenLayer& layer) {
    Expert expert = layer.model->version(0);
    nvfp4_moe_expert_out out = SoakModel::buffers(expert);
    if (!done_or_busy(nvfp4_moe_layer_unpack_expert(layer.handle, 0, &out), layer)) return;
    EXPECT_LT(layer.model->version_of(out), SoakModel::kVersions) << layer.model->name();
  }

  // Runs and replacements allocate nothing, unpack does.
  static void fork_child(const OpenLayer& layer, size_t index) {
    const SoakModel& model = *layer.model;
    TinyBatch batch = model.batch(index);
    Expert expert = model.version(0);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes);
    const auto run = [&] {
      const nvfp4_moe_batch c = c_batch(batch);
      return nvfp4_moe_layer_run(layer.handle, &c, workspace.data(), workspace.size_bytes(),
                                 nullptr) == kOk;
    };
    const int failed = in_forked_child([&] {
      if (!run() || model.version_of(layer.backend, index, batch.out) == SoakModel::kVersions)
        return 1;
      for (size_t version = 0; version < SoakModel::kVersions; ++version) {
        const nvfp4_moe_expert other = CLayer::expert(model.version(version));
        if (nvfp4_moe_layer_replace_expert(layer.handle, 0, &other) != kOk) return 2;
        if (!run() || !same_bits(batch.out, model.right(layer.backend, index, version).out))
          return 3;
        if (!kChildMayAllocate) continue;
        nvfp4_moe_expert_out out = SoakModel::buffers(expert);
        if (nvfp4_moe_layer_unpack_expert(layer.handle, 0, &out) != kOk) return 4;
        if (model.version_of(out) != version) return 5;
      }
      return 0;
    });
    EXPECT_EQ(failed, 0) << model.name();
  }

  static void describe(const OpenLayer& layer) {
    const std::string text = nvfp4_moe::text_of(nvfp4_moe_layer_describe, layer.handle);
    EXPECT_NE(text.find(kSoakBackends[layer.backend]), std::string::npos) << text;
    EXPECT_NE(nvfp4_moe::text_of(nvfp4_moe_layer_describe_run, layer.handle, int64_t{5}), "");
  }

  void replay(const OpenLayer& layer, const std::string& path) {
    TinyBatch batch = layer.model->batch(2);
    const nvfp4_moe_batch c = c_batch(batch);
    if (!done_or_busy(nvfp4_moe_layer_write_repro(layer.handle, &c, 0, path.c_str()), layer))
      return;
    char* json = nullptr;
    EXPECT_EQ(nvfp4_moe_replay(path.c_str(), kSoakBackends[layer.backend], &json), kOk)
        << nvfp4_moe_last_error();
    nvfp4_moe_text_free(json);
  }

  std::vector<SoakModel> models_;
  const std::unique_ptr<Executor> pool_ = make_thread_pool(2);  // shared by several layers
  const TempDir directory_;
  const std::string cache_ = directory_.file("cache");
  std::array<Slot, kSlots> slots_;
  const nvfp4_moe::Workspace shared_workspace_{size_t{16} << 20};
  std::array<std::atomic<uint64_t>, kActions> counts_{};
  std::atomic<uint64_t> busy_{0};
  std::array<std::atomic<uint64_t>, kThreads> steps_{};
  std::array<std::atomic<size_t>, kThreads> doing_{};
  std::atomic<int> done_{0};
};

ATTACK_TEST(kForks, Soak, FourThreadsOnSharedLayers) {
  const char* const asked = std::getenv("NVFP4_MOE_SOAK_SECONDS");
  const std::chrono::seconds length(asked != nullptr ? std::atoi(asked) : 2);
  ASSERT_GT(length.count(), 0) << "NVFP4_MOE_SOAK_SECONDS";
  std::atomic<uint64_t> logged{0};
  nvfp4_moe_set_log_callback(
      [](int, const char*, void* user) { ++*static_cast<std::atomic<uint64_t>*>(user); }, &logged);
  std::thread([] {}).join();  // with the first thread a sanitizer starts one of its own
  const size_t descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  {
    Soak soak;
    soak.run(length);
    RecordProperty("seconds", std::to_string(length.count()));
    RecordProperty("threads", kThreads);
    std::printf("soak of %lld s, %d threads:", static_cast<long long>(length.count()), kThreads);
    for (size_t action = 0; action < kActions; ++action) {
      const uint64_t count = soak.count(static_cast<Action>(action));
      EXPECT_GT(count, 0u) << kInfo[action].name;
      RecordProperty(kInfo[action].name, std::to_string(count));
      std::printf(" %s %llu", kInfo[action].name, static_cast<unsigned long long>(count));
    }
    RecordProperty("busy", std::to_string(soak.busy()));
    std::printf(" busy %llu\n", static_cast<unsigned long long>(soak.busy()));
  }
  nvfp4_moe_set_log_callback(nullptr, nullptr);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
}

}  // namespace
}  // namespace nvfp4_moe::internal
