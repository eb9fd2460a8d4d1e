// Layers, backends and a kept log for the tests of NVFP4_MOE_CHECK on a GPU.
#pragma once

#include <cuda_runtime.h>

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

// The lines of the log; the callback blocks while log_blocks is set.
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

class CudaCheck : public BackendTest {
 protected:
  CudaCheck() { wrong_token = kWrongToken; }
  static LayerOptions options(int64_t max_tokens = kCheckTokens) {
    LayerOptions options = tiny_layer_options(max_tokens);
    options.device = "cuda:0";
    return options;
  }
  static std::unique_ptr<MoeLayer> open(const Backend& backend, const TinyLayer& tiny) {
    auto layer = MoeLayer::open_on(backend, tiny.config(), tiny.source(), options());
    EXPECT_OK(layer);
    return layer.ok() ? std::move(*layer) : nullptr;
  }
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
