// A layer small enough for every test of this room: random codes and block scales, real routing.
#pragma once

#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "core/executor.h"
#include "core/float_formats.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> codes, block_scales;
  float tensor_scale = 1.0f;

  // Block scales of 0.5 to 3.75.
  static Matrix random(int64_t rows, int64_t cols, float tensor_scale, std::mt19937& random) {
    Matrix matrix{rows, cols, std::vector<uint8_t>(static_cast<size_t>(rows * cols / 2)),
                  std::vector<uint8_t>(static_cast<size_t>(rows * cols / 16)), tensor_scale};
    for (auto& byte : matrix.codes) byte = static_cast<uint8_t>(random());
    for (auto& byte : matrix.block_scales) byte = static_cast<uint8_t>(0x30 + random() % 0x18);
    return matrix;
  }
  Nvfp4View view() const {
    return Nvfp4View::contiguous(codes.data(), block_scales.data(), tensor_scale, rows, cols);
  }
};

struct Expert {
  Matrix gate, up, down;
  static Expert random(int64_t hidden, int64_t intermediate, std::mt19937& random) {
    return {Matrix::random(intermediate, hidden, 0.011f, random),
            Matrix::random(intermediate, hidden, 0.017f, random),
            Matrix::random(hidden, intermediate, 0.013f, random)};
  }
  ExpertSource source() const { return {gate.view(), up.view(), down.view()}; }
};

inline MoeOptions tiny_options() { return test::sizes_of(4, 2, 64, 48); }

struct TinyLayer {
  MoeOptions options;
  std::vector<Expert> experts;  // (num_experts), global
  std::vector<Expert> shared;   // 0 or 1
  LayerScales scales;

  explicit TinyLayer(const MoeOptions& layer_options = tiny_options(), uint32_t seed = 7)
      : options(layer_options) {
    std::mt19937 random(seed);
    for (int64_t e = 0; e < options.num_experts; ++e)
      experts.push_back(Expert::random(options.hidden_size, options.intermediate_size, random));
    if (options.shared_intermediate_size > 0)
      shared.push_back(
          Expert::random(options.hidden_size, options.shared_intermediate_size, random));
  }
  MoeConfig config() const { return MoeConfig::make(options).value(); }
  LayerSource source() const {
    LayerSource source;
    source.scales = scales;
    const auto loaded = [](const Expert& expert) -> Result<LoadedExpert> {
      LoadedExpert loaded;
      loaded.source = expert.source();
      return loaded;
    };
    source.expert = [this, loaded](int64_t e) { return loaded(experts[static_cast<size_t>(e)]); };
    if (!shared.empty()) source.shared_expert = [this, loaded] { return loaded(shared[0]); };
    return source;
  }
};

inline LayerOptions tiny_layer_options(int64_t max_tokens = 16) {
  LayerOptions options;
  options.limits.max_tokens = max_tokens;
  options.executor = &serial_executor();
  return options;
}

// Inputs and output of one call; out is F32 by default.
struct TinyBatch {
  int64_t tokens;
  std::vector<uint16_t> hidden;  // (tokens, hidden) bf16
  std::vector<int32_t> ids;      // (tokens, top_k)
  std::vector<float> weights;    // (tokens, top_k)
  std::vector<float> out;        // (tokens, hidden)

  TinyBatch(const MoeOptions& options, int64_t count, uint32_t seed = 3) : tokens(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(0.1f, 0.9f);
    for (int64_t i = 0; i < tokens * options.hidden_size; ++i)
      hidden.push_back(bf16_from_float(normal(random)));
    for (int64_t i = 0; i < tokens * options.top_k; ++i) {
      ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(options.num_experts)));
      weights.push_back(uniform(random));
    }
    out.assign(static_cast<size_t>(tokens * options.hidden_size), -77.0f);
  }
  Batch batch() {
    return {.tokens = tokens,
            .hidden = hidden.data(),
            .topk_ids = ids.data(),
            .topk_weights = weights.data(),
            .out = out.data(),
            .out_dtype = DType::kF32};
  }
};

// Opened on that backend, or on the one that the options name. If it does not open: null, and the
// test fails.
inline std::unique_ptr<MoeLayer> open_tiny(const TinyLayer& tiny,
                                           const LayerOptions& options = tiny_layer_options(),
                                           const Backend* backend = nullptr) {
  auto layer = backend == nullptr
                   ? MoeLayer::open(tiny.config(), tiny.source(), options)
                   : MoeLayer::open_on(*backend, tiny.config(), tiny.source(), options);
  EXPECT_OK(layer);
  return layer.ok() ? std::move(*layer) : nullptr;
}

inline Buffer workspace_of(const MoeLayer& layer) {
  return allocate_pages(layer.workspace_bytes()).value();
}
inline Status run_in(const Buffer& workspace, const MoeLayer& layer, const Batch& batch) {
  return layer.run(batch, workspace.data(), workspace.size_bytes());
}

// Runs on a fresh workspace and returns the output.
inline std::vector<float> run_tiny(const MoeLayer& layer, TinyBatch& batch) {
  EXPECT_OK(run_in(workspace_of(layer), layer, batch.batch()));
  return batch.out;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// An executor that does something in the middle of a run.
class Interrupting : public Executor {
 public:
  std::function<void()> in_the_middle;
  void parallel_for(int64_t count, int64_t grain, const Body& body) override {
    if (in_the_middle) std::exchange(in_the_middle, nullptr)();
    serial_executor().parallel_for(count, grain, body);
  }
  int threads() const override { return 1; }
};

// Sets an environment variable until the end of a scope.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~ScopedEnv() { unsetenv(name_); }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  const char* name_;
};

}  // namespace nvfp4_moe::internal::test
