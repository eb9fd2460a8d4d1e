// Layers, backends and a kept log for the tests of NVFP4_MOE_CHECK on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "io/json.h"
#include "moe/layer.h"
#include "moe/placed_batch.h"
#include "moe/tiny.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

constexpr int64_t kCheckTokens = 9, kWrongToken = 3, kWrongChannel = 17;

// A backend whose runs write 48.6 to a channel of one token, or of all (-1).
inline const Backend* real_backend = nullptr;
inline int64_t wrong_token = kWrongToken;
inline Backend wrong_backend(const Backend& real) {
  real_backend = &real;
  Backend backend = real;
  backend.name = "wrong";
  backend.run = [](const PackedWeights& weights, const Plan& plan, const Batch& batch,
                   std::byte* workspace, const RunContext& context) -> Status {
    NVFP4_MOE_TRY(real_backend->run(weights, plan, batch, workspace, context));
    for (int64_t token = 0; token < batch.tokens; ++token) {
      if (wrong_token >= 0 && token != wrong_token) continue;
      auto* const at =
          static_cast<float*>(batch.out) + token * weights.config->hidden_size + kWrongChannel;
      EXPECT_EQ(cudaMemsetAsync(at, 0x42, sizeof(float), static_cast<cudaStream_t>(context.stream)),
                cudaSuccess);
    }
    return {};
  };
  return backend;
}

struct CheckCounts {
  int64_t checked, dropped, failed;
};
inline CheckCounts counts_of(const MoeLayer& layer) {
  const Json check = Json::parse(layer.describe_json())["check"];
  return {check["checked"].get<int64_t>(), check["dropped"].get<int64_t>(),
          check["failed"].get<int64_t>()};
}

// A layer's batch in device memory, with a stream of its own.
struct Caller {
  const MoeLayer& layer;
  TinyBatch host;
  PlacedBatch placed;
  Buffer workspace;
  OwnStream stream;

  Caller(const MoeLayer& of, const TinyBatch& batch)
      : layer(of),
        host(batch),
        placed(*PlacedBatch::place(of, host.batch())),
        workspace(*of.backend().allocate(of.workspace_bytes(), 0, "workspace")) {}
  Status run() { return run(placed.batch()); }
  Status run(const Batch& batch) {
    return layer.run(batch, workspace.data(), workspace.size_bytes(), stream);
  }
  Status status() {
    return layer.status(workspace.data(), workspace.size_bytes(), stream).status();
  }
};

// The lines of the log since the last KeptLog began; the callback blocks while log_blocks is set.
inline std::mutex logged_mutex;
inline std::condition_variable logged_changed;
inline std::vector<std::string> logged;
inline bool log_blocks = false;
inline void keep_line(int level, const char* text, void*) {
  std::unique_lock lock(logged_mutex);
  EXPECT_EQ(level, static_cast<int>(LogLevel::kError));
  logged.emplace_back(text);
  logged_changed.notify_all();
  logged_changed.wait(lock, [] { return !log_blocks; });
}

class KeptLog {
 public:
  explicit KeptLog(bool blocks = false) {
    logged.clear();
    log_blocks = blocks;
    set_log_callback(keep_line, nullptr);
  }
  ~KeptLog() {
    unblock();
    set_log_callback(nullptr, nullptr);
  }
  // Waits for a line, a minute at most.
  bool has_line() {
    std::unique_lock lock(logged_mutex);
    return logged_changed.wait_for(lock, std::chrono::seconds(60), [] { return !logged.empty(); });
  }
  void unblock() {
    const std::lock_guard lock(logged_mutex);
    log_blocks = false;
    logged_changed.notify_all();
  }
};

class CudaCheck : public BackendTest {
 protected:
  CudaCheck() { wrong_token = kWrongToken; }
  static LayerOptions options(int64_t max_tokens = kCheckTokens) {
    LayerOptions options = tiny_layer_options(max_tokens);
    options.device = "cuda:0";
    return options;
  }
  static std::unique_ptr<MoeLayer> open(const Backend& backend, const TinyLayer& tiny) {
    return std::move(*must(MoeLayer::open_on(backend, tiny.config(), tiny.source(), options())));
  }
  // A layer with a caller, whose batch is always the same.
  struct CheckedLayer {
    std::unique_ptr<MoeLayer> layer;
    Caller caller;
    explicit CheckedLayer(const Backend& backend, const TinyLayer& tiny = TinyLayer())
        : layer(open(backend, tiny)), caller(*layer, TinyBatch(tiny.options, kCheckTokens)) {}
  };
  // Layers with a shared expert, of every format that the backend takes.
  std::vector<MoeOptions> kinds() const {
    std::vector<MoeOptions> taken;
    for (const ActivationFormat format : kActivationFormats) {
      MoeOptions options = tiny_options();
      options.hidden_size = 128;
      options.intermediate_size = 64;
      options.shared_intermediate_size = 32;
      options.activation_format = format;
      if (!declines(backend(), *MoeConfig::make(options))) taken.push_back(options);
    }
    EXPECT_FALSE(taken.empty());
    return taken;
  }

 private:
  const ScopedEnv check_{"NVFP4_MOE_CHECK", "1"};
};

}  // namespace nvfp4_moe::internal::test
