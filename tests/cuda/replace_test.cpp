// Replacing experts on a GPU in stream order: outputs have the bits of either the old or the new
// expert.
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "moe/layer.h"
#include "moe/placed_batch.h"
#include "moe/tiny.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kTokens = 9;

// A layer's experts made from a seed, with biases if the options ask for them.
struct Weights {
  TinyLayer tiny;
  std::vector<std::vector<float>> biases;  // (num_experts) for gate, up and down

  Weights(const MoeOptions& options, uint32_t seed) : tiny(options, seed) {
    for (int64_t e = 0; options.expert_biases && e < options.num_experts; ++e)
      for (int64_t i = 0; i < options.hidden_size; ++i) {
        if (i == 0) biases.emplace_back();
        biases.back().push_back(0.05f * static_cast<float>((i + e + seed) % 31));
      }
  }
  Expert& expert(int64_t e) {
    return e == kSharedExpert ? tiny.shared[0] : tiny.experts[static_cast<size_t>(e)];
  }
  ExpertSource source_of(int64_t e) {
    ExpertSource source = expert(e).source();
    if (e == kSharedExpert || biases.empty()) return source;
    const float* const bias = biases[static_cast<size_t>(e)].data();
    source.biases = {bias, bias + 1, bias};
    return source;
  }
  // Copies one expert of others.
  void take(int64_t e, Weights& other) {
    expert(e) = other.expert(e);
    if (e != kSharedExpert && !biases.empty())
      biases[static_cast<size_t>(e)] = other.biases[static_cast<size_t>(e)];
  }
  LayerSource source() {
    LayerSource source = tiny.source();
    source.expert = [this](int64_t e) -> Result<LoadedExpert> {
      LoadedExpert loaded;
      loaded.source = source_of(e);
      return loaded;
    };
    return source;
  }
};

// Together these layers have every part of an expert: codes, block scales, shifts, biases, a shared
// expert, codes of blocks with scale 0.
std::vector<MoeOptions> kinds_of_layers() {
  MoeOptions options = tiny_options();
  options.hidden_size = 256;
  options.intermediate_size = 128;
  std::vector<MoeOptions> kinds(3, options);
  kinds[0].shared_intermediate_size = 64;
  kinds[1].activation_format = ActivationFormat::kBf16;
  kinds[1].expert_biases = true;
  kinds[2].activation_format = ActivationFormat::kFp8;
  kinds[2].shared_intermediate_size = 96;
  return kinds;
}

class CudaReplace : public BackendTest {
 protected:
  static LayerOptions options() {
    LayerOptions options;
    options.device = "cuda:0";
    options.limits.max_tokens = kTokens;
    options.executor = &serial_executor();
    return options;
  }
  std::unique_ptr<MoeLayer> open(Weights& weights) {
    auto layer = MoeLayer::open_on(backend(), weights.tiny.config(), weights.source(), options());
    EXPECT_OK(layer);
    return layer.ok() ? std::move(*layer) : nullptr;
  }
  bool takes(const MoeOptions& kind) { return !declines(backend(), *MoeConfig::make(kind)); }
  // The result of a new layer with these weights.
  std::vector<float> expected(Weights& weights, TinyBatch batch) {
    const auto layer = open(weights);
    EXPECT_OK(run_from_host(*layer, batch.batch()));
    return batch.out;
  }
  static void expect_unpacks(const MoeLayer& layer, int64_t e, Weights& weights) {
    ExpertBuffers out;
    ASSERT_OK(layer.unpack_expert(e, out));
    const Expert& in = weights.expert(e);
    EXPECT_EQ(out.gate.codes, in.gate.codes);
    EXPECT_EQ(out.up.block_scales, in.up.block_scales);
    EXPECT_EQ(out.down.codes, in.down.codes);
    EXPECT_EQ(out.scales,
              (TensorScales{in.gate.tensor_scale, in.up.tensor_scale, in.down.tensor_scale}));
    if (e != kSharedExpert && !weights.biases.empty()) {
      EXPECT_EQ(out.down_bias, weights.biases[static_cast<size_t>(e)]);
    }
  }
};

// A layer with a batch that one stream runs, eagerly or as a graph.
struct Runner {
  const MoeLayer& layer;
  OwnStream stream;
  TinyBatch host;
  PlacedBatch placed;
  Buffer workspace;
  std::optional<Graph> graph;

  Runner(const MoeLayer& of, const TinyBatch& batch)
      : layer(of),
        host(batch),
        placed(*PlacedBatch::place(of, host.batch())),
        workspace(*of.backend().allocate(of.workspace_bytes(), 0, "workspace")) {
    EXPECT_OK(run());
    stream.synchronize();
  }
  Status run() {
    return layer.run(placed.batch(), workspace.data(), workspace.size_bytes(), stream);
  }
  void capture() {
    graph.emplace(stream, [&] { return run(); });
    EXPECT_OK(graph->status());
  }
  size_t out_bytes() const { return host.out.size() * sizeof(float); }
};

// One thread that never waits: each replay sees the replacements before it and none after it.
TEST_P(CudaReplace, ReplaysAndReplacementsFollowEachOther) {
  for (const MoeOptions& kind : kinds_of_layers()) {
    if (!takes(kind)) continue;
    SCOPED_TRACE(to_string(kind.activation_format));
    Weights now(kind, 7), other(kind, 8);
    other.expert(0).gate.block_scales[5] = 0;  // its codes unpack, but multiply nothing
    for (int64_t e = 0; e < kind.num_experts;
         ++e) {  // other exponents: other shifts and tensor scales
      other.expert(e).up.tensor_scale = 0.31f;
      other.expert(e).down.tensor_scale = 0.004f;
    }
    const auto layer = open(now);
    ASSERT_NE(layer, nullptr);
    const TinyBatch batch(kind, kTokens);
    Runner runner(*layer, batch);
    runner.capture();
    std::vector<int64_t> replaced = {0, 3, 1};
    if (kind.shared_intermediate_size > 0) replaced.push_back(kSharedExpert);
    const Buffer outs =
        *backend().allocate((replaced.size() + 1) * runner.out_bytes(), 0, "outputs");
    std::vector<std::vector<float>> expected_outs;
    std::vector<Weights> states;
    for (size_t i = 0;; ++i) {
      states.push_back(now);
      runner.graph->launch();
      ASSERT_CUDA(cudaMemcpyAsync(outs.data() + i * runner.out_bytes(), runner.placed.batch().out,
                                  runner.out_bytes(), cudaMemcpyDeviceToDevice, runner.stream));
      if (i == replaced.size()) break;
      Weights lent = other;  // freed once the call has returned
      ASSERT_OK(
          layer->replace_expert_on_stream(replaced[i], lent.source_of(replaced[i]), runner.stream));
      for (auto& array :
           {&lent.expert(replaced[i]).gate.codes, &lent.expert(replaced[i]).down.block_scales})
        std::fill(array->begin(), array->end(), uint8_t{0x11});
      now.take(replaced[i], other);
    }
    expect_unpacks(*layer, replaced.back(), other);  // waits for the replacement
    for (const int64_t e : replaced) expect_unpacks(*layer, e, other);
    runner.stream.synchronize();
    for (size_t i = 0; i < states.size(); ++i) {
      std::vector<float> out(runner.host.out.size());
      ASSERT_CUDA(cudaMemcpy(out.data(), outs.data() + i * runner.out_bytes(), runner.out_bytes(),
                             cudaMemcpyDefault));
      EXPECT_TRUE(same_bits(out, expected(states[i], batch))) << "after " << i << " replacements";
      if (i > 0) {
        EXPECT_FALSE(same_bits(out, expected(states[i - 1], batch))) << "replacement " << i;
      }
    }
    if (HasFailure()) return;
  }
}

// Two threads: one runs or replays inputs in turn, the other replaces. 15,000 replays on a GPU,
// over all kinds of layers; at most 10 seconds per kind.
class CudaReplaceThreads : public CudaReplace {
 protected:
  void expect_no_mixtures(const MoeOptions& kind, bool replays) {
    constexpr int kInputs = 7, kRuns = 5000;
    Weights old(kind, 7), other(kind, 8);
    std::vector<TinyBatch> inputs;
    std::array<std::vector<std::vector<float>>, 2> right;
    for (int i = 0; i < kInputs; ++i) {
      inputs.emplace_back(kind, kTokens, 20 + static_cast<uint32_t>(i));
      for (int64_t t = 0; t < kTokens; ++t)
        inputs.back().ids[static_cast<size_t>(t * kind.top_k)] = 0;
      inputs.back().ids = inputs.front().ids;  // only hidden states are copied below
      inputs.back().weights = inputs.front().weights;
    }
    Weights changed = old;
    changed.take(0, other);
    for (const TinyBatch& input : inputs) {
      right[0].push_back(expected(old, input));
      right[1].push_back(expected(changed, input));
      ASSERT_FALSE(same_bits(right[0].back(), right[1].back()));
    }
    const auto layer = open(old);
    ASSERT_NE(layer, nullptr);
    Runner runner(*layer, inputs[0]);
    if (replays) runner.capture();
    std::atomic<bool> stop{false};
    std::atomic<int> replaced{0};
    std::thread writer([&] {
      for (int i = 1; !stop; ++i) {
        EXPECT_OK(layer->replace_expert_on_stream(0, (i % 2 != 0 ? other : old).source_of(0),
                                                  runner.stream));
        ++replaced;
      }
    });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    std::array<int, 3> seen{};  // old, new, mixed
    std::vector<float> out(runner.host.out.size());
    int runs = 0;
    for (; runs < kRuns && std::chrono::steady_clock::now() < deadline; ++runs) {
      const auto input = static_cast<size_t>(runs % kInputs);
      ASSERT_CUDA(cudaMemcpyAsync(
          const_cast<void*>(runner.placed.batch().hidden), inputs[input].hidden.data(),
          inputs[input].hidden.size() * sizeof(uint16_t), cudaMemcpyDefault, runner.stream));
      if (replays)
        runner.graph->launch();
      else
        ASSERT_OK(runner.run());  // never kBusy
      ASSERT_CUDA(cudaMemcpyAsync(out.data(), runner.placed.batch().out, runner.out_bytes(),
                                  cudaMemcpyDefault, runner.stream));
      runner.stream.synchronize();
      ++seen[same_bits(out, right[0][input]) ? 0 : same_bits(out, right[1][input]) ? 1 : 2];
    }
    stop = true;
    writer.join();
    printf("%d runs, %d replacements: %d old, %d new, %d mixed\n", runs, replaced.load(), seen[0],
           seen[1], seen[2]);
    EXPECT_EQ(seen[2], 0) << "of " << runs;
    EXPECT_GT(seen[0], 0);
    EXPECT_GT(seen[1], 0);
  }
};

TEST_P(CudaReplaceThreads, ReplaysHaveTheOldExpertOrTheNewOne) {
  for (const MoeOptions& kind : kinds_of_layers())
    if (takes(kind)) expect_no_mixtures(kind, true);
}
TEST_P(CudaReplaceThreads, RunsHaveTheOldExpertOrTheNewOneAndAreNeverRefused) {
  expect_no_mixtures(kinds_of_layers()[0], false);
}

// Illegal arguments are refused before anything is enqueued. A captured layer is replaced only on a
// stream, or at rest.
TEST_P(CudaReplace, RefusesWhatItCannotOrder) {
  const MoeOptions kind = kinds_of_layers()[0];
  Weights old(kind, 7), other(kind, 8), bad(kind, 8);
  const auto layer = open(old);
  ASSERT_NE(layer, nullptr);
  Runner runner(*layer, TinyBatch(kind, kTokens));
  bad.expert(0).down.block_scales.back() = 0xFF;
  EXPECT_EQ(layer->replace_expert_on_stream(0, bad.source_of(0), runner.stream).code(),
            Code::kBadInput);
  EXPECT_EQ(layer->replace_expert_on_stream(4, other.source_of(0), runner.stream).code(),
            Code::kInvalidArgument);
  expect_unpacks(*layer, 0, old);
  ASSERT_OK(layer->replace_expert(0, other.source_of(0)));  // only eager runs so far
  Status captured;
  runner.graph.emplace(runner.stream, [&]() -> Status {
    captured = layer->replace_expert_on_stream(1, other.source_of(1), runner.stream);
    return runner.run();
  });
  EXPECT_OK(runner.graph->status());
  EXPECT_THAT(captured, Refused(Code::kInvalidArgument, "not being captured"));
  EXPECT_THAT(layer->replace_expert(1, other.source_of(1)),
              Refused(Code::kInvalidArgument, "replace_expert_on_stream"));
  expect_unpacks(*layer, 1, old);
  ASSERT_OK(layer->replace_expert_on_stream(1, other.source_of(1), runner.stream));
  expect_unpacks(*layer, 1, other);
  ASSERT_OK(layer->replace_expert_at_rest(1, old.source_of(1)));
  expect_unpacks(*layer, 1, old);
}

// A thread that captures and one that replaces on a stream need no lock.
TEST_P(CudaReplace, OnAStreamDisturbsNoCaptureOfAnotherThread) {
  const MoeOptions kind = kinds_of_layers()[0];
  Weights old(kind, 7), other(kind, 8);
  const auto layer = open(old);
  ASSERT_NE(layer, nullptr);
  const TinyBatch batch(kind, kTokens);
  Runner runner(*layer, batch);
  const OwnStream second;
  const auto replace_in_a_thread = [&](Weights& weights) {
    std::thread([&] {
      EXPECT_OK(layer->replace_expert_on_stream(0, weights.source_of(0), second));
    }).join();
  };
  replace_in_a_thread(other);  // a capture cannot load what a first call loads
  const Graph graph(
      runner.stream,
      [&] {
        replace_in_a_thread(old);
        const Status status = runner.run();
        replace_in_a_thread(other);
        return status;
      },
      cudaStreamCaptureModeGlobal);
  ASSERT_OK(graph.status());
  second.synchronize();
  graph.launch();
  runner.stream.synchronize();
  ASSERT_OK(runner.placed.fetch(runner.stream));
  Weights changed = old;
  changed.take(0, other);
  EXPECT_TRUE(same_bits(runner.host.out, expected(changed, batch)));
}

// If nothing orders two streams, the later call's weights remain: an expert is never a mix of both.
TEST_P(CudaReplace, ReplacementsOfTwoStreamsAreInTheOrderOfTheirCalls) {
  const MoeOptions kind = kinds_of_layers()[0];
  Weights old(kind, 7), other(kind, 8), last(kind, 9);
  const auto layer = open(old);
  ASSERT_NE(layer, nullptr);
  const OwnStream slow, quick;
  ASSERT_OK(layer->replace_expert_on_stream(0, old.source_of(0), quick));
  ASSERT_CUDA(cudaLaunchHostFunc(
      slow, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }, nullptr));
  ASSERT_OK(layer->replace_expert_on_stream(0, other.source_of(0), slow));
  ASSERT_OK(layer->replace_expert_on_stream(0, last.source_of(0), quick));
  ASSERT_CUDA(cudaDeviceSynchronize());
  expect_unpacks(*layer, 0, last);
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaReplace, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);
INSTANTIATE_TEST_SUITE_P(Backends, CudaReplaceThreads, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
