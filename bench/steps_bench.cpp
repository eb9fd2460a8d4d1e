// Each step of a layer by itself, on every host backend: where a layer's time goes. hidden 1024, intermediate 512,
// 16 experts, top-4, W4A4; the argument is the number of tokens. The whole layer runs once first, so that every step
// finds the inputs that the steps before it leave.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>

#include "backend/host_layer.h"
#include "cli/random_layer.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe {
namespace {

struct Prepared {
  std::unique_ptr<Executor> executor = make_thread_pool();
  std::unique_ptr<MoeLayer> layer;
  cli::RandomTokens tokens;
  Buffer memory;
};

Result<Prepared> prepare(const Backend& backend, int64_t count) {
  MoeOptions options;
  options.num_experts = 16;
  options.top_k = 4;
  options.hidden_size = 1024;
  options.intermediate_size = 512;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  Prepared prepared;
  LayerOptions layer;
  layer.limits.max_tokens = count;
  layer.executor = prepared.executor.get();
  NVFP4_MOE_ASSIGN(prepared.layer, MoeLayer::open_on(backend, config, cli::random_layer(options, 1), layer));
  prepared.tokens = cli::random_tokens(options, {0, options.num_experts}, count, 2);
  NVFP4_MOE_ASSIGN(prepared.memory, allocate_pages(prepared.layer->workspace_bytes()));
  NVFP4_MOE_TRY(
      prepared.layer->run(prepared.tokens.batch(), prepared.memory.data(), prepared.layer->workspace_bytes()));
  return prepared;
}

using Step = void (*)(const HostSteps&, const HostCall&);

void time_step(benchmark::State& state, const Backend& backend, Step step) {
  Result<Prepared> prepared = prepare(backend, state.range(0));
  if (!prepared.ok()) return state.SkipWithError(prepared.status().message().c_str());
  const MoeLayer& layer = *prepared->layer;
  const Result<Workspace> workspace =
      Workspace::make(prepared->memory.data(), layer.workspace_bytes(), layer.plan().workspace);
  if (!workspace.ok()) return state.SkipWithError(workspace.status().message().c_str());
  const HostBuffers buffers = host_buffers(layer.config(), layer.weights().range, *workspace);
  const Batch batch = prepared->tokens.batch();
  const HostCall call{layer.weights(), batch, buffers, *prepared->executor};
  for (auto _ : state) step(*backend.steps, call);
}

const bool kRegistered = [] {
  static constexpr std::pair<const char*, Step> kSteps[] = {
      {"route", [](const HostSteps& steps, const HostCall& call) { steps.route(call); }},
      {"quantize", [](const HostSteps& steps, const HostCall& call) { steps.quantize(call); }},
      {"gemm1_swiglu", [](const HostSteps& s, const HostCall& call) { s.gemm1_swiglu(call, call.buffers.routed); }},
      {"requantize", [](const HostSteps& steps, const HostCall& call) { steps.requantize(call, call.buffers.routed); }},
      {"gemm2", [](const HostSteps& steps, const HostCall& call) { steps.gemm2(call, call.buffers.routed); }},
      {"combine", [](const HostSteps& steps, const HostCall& call) { steps.combine(call); }},
  };
  for (const Backend* backend : backends()) {
    if (backend->steps == nullptr || backend->memory != nullptr) continue;
    for (const auto& [name, step] : kSteps) {
      const std::string title = std::string(backend->name) + "/" + name;
      benchmark::RegisterBenchmark(
          title.c_str(), [backend, step = step](benchmark::State& state) { time_step(state, *backend, step); })
          ->Arg(1)
          ->Arg(64)
          ->Unit(benchmark::kMicrosecond)
          ->UseRealTime();
    }
  }
  return true;
}();

}  // namespace
}  // namespace nvfp4_moe
