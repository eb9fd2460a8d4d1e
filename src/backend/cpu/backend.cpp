// The CPU backend's Backend tables: "cpu", which runs the best instruction set of the host, and one
// "cpu:NAME" for each instruction set of this build, so that a layer, a test or a measurement can
// force it. All share one packed layout.
#include "backend/backend.h"

#include <array>
#include <iterator>
#include <span>
#include <utility>

#include "backend/cpu/kernels.h"
#include "backend/cpu/linear.h"
#include "backend/cpu/pack.h"
#include "backend/cpu/scratch.h"
#include "backend/cpu/steps.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal {
namespace cpu {
namespace {

// All arrays of a run with that many tokens.
void take_arrays(const MoeConfig& config, const ExpertRange& range, int64_t tokens,
                 const Kernels& kernels, Arena& arena) {
  layer_buffers(config, range, tokens, arena);
  LayerScratch(config, range, tokens, kernels, arena);
}

Plan make_plan(const char* backend, const Kernels& kernels, const MoeConfig& config,
               const ExpertRange& range, const Limits& limits, const DeviceFacts& device) {
  const char* gemm = kernels.multiplication(config->activation_format).name;
  const std::string rows = std::string(kernels.name) + "_rows";
  const auto walk = [&](Arena& arena) {
    take_arrays(config, range, limits.max_tokens, kernels, arena);
  };
  Plan plan{.backend = backend,
            .limits = limits,
            .device = device,
            .steps = {},
            .workspace = WorkspaceLayout::of(walk, limits.guard_bytes)};
  plan.steps = {{"route", "counting_sort"}, {"quantize", rows}, {"gemm1_swiglu", gemm},
                {"requantize", rows},       {"gemm2", gemm},    {"combine", rows}};
  return plan;
}

LayerScratch scratch_of(const StepContext& step, const Kernels& kernels) {
  Arena arena = step.scratch;
  return LayerScratch(step.weights.config, step.weights.range, step.batch.tokens, kernels, arena);
}

// The layer, one call per step.
void run_layer(const StepContext& step, const Kernels& kernels) {
  const LayerScratch scratch = scratch_of(step, kernels);
  route(step);
  quantize(step, kernels, &scratch);
  for (const PartBuffers* part : {&step.buffers.routed, &step.buffers.shared}) {
    if (part->experts == 0) continue;
    multiply_gate_up(step, *part, kernels, scratch);
    requantize(step, *part, kernels, &scratch.intermediate(*part));
    multiply_down(step, *part, kernels, scratch);
  }
  combine(step, kernels);
}

// The instruction set of an entry.
const Kernels& best() { return best_kernels(); }
template <size_t kIndex>
const Kernels& forced() {
  return *kAllKernels[kIndex];
}

// The functions of one entry.
template <const Kernels& (*kKernels)()>
struct Entry {
  static Status supports(const MoeConfig&, const DeviceFacts& device) {
    if (device.kind != DeviceKind::kCpu)
      return unsupported("device: expected a CPU, got " + device.name);
    if (!kKernels().runs_on_host())
      return unsupported(std::string("instruction set ") + kKernels().name +
                         ": expected a CPU with " + kKernels().requires_text +
                         ", this one lacks it; backend cpu takes the best that it has");
    return {};
  }
  static Result<Plan> plan(const MoeConfig& config, const ExpertRange& range,
                           const LayerScales& scales, const Limits& limits,
                           const DeviceFacts& device) {
    NVFP4_MOE_TRY(check_layer_limits(config, range, limits));
    NVFP4_MOE_TRY(resolve_activation_scales(config, scales).status());
    return make_plan(kKernels == best ? "cpu" : kKernels().backend_name, kKernels(), config, range,
                     limits, device);
  }
  static Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch,
                    std::byte* workspace, const RunContext& context) {
    Arena arena(workspace, plan.limits.guard_bytes);
    const LayerBuffers buffers = layer_buffers(weights.config, weights.range, batch.tokens, arena);
    run_layer({weights, batch, buffers, *context.executor, arena}, kKernels());
    return {};
  }
  static size_t workspace_bytes(const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                                int64_t tokens) {
    Arena arena(nullptr, plan.limits.guard_bytes);
    take_arrays(config, range, tokens, kKernels(), arena);
    return arena.size_bytes();
  }
  static size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens) {
    return cpu::linear_workspace_bytes(weights, max_tokens, kKernels());
  }
  static Status linear_run(const LinearWeights& weights, const LinearBatch& batch,
                           std::byte* workspace, const RunContext& context) {
    return cpu::linear_run(weights, batch, workspace, context, kKernels());
  }

  static void quantize(const StepContext& step) { cpu::quantize(step, kKernels(), nullptr); }
  static void gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
    const LayerScratch scratch = scratch_of(step, kKernels());
    hidden_operands(step, kKernels(), scratch);
    multiply_gate_up(step, part, kKernels(), scratch);
  }
  static void requantize(const StepContext& step, const PartBuffers& part) {
    cpu::requantize(step, part, kKernels(), nullptr);
  }
  static void gemm2(const StepContext& step, const PartBuffers& part) {
    const LayerScratch scratch = scratch_of(step, kKernels());
    intermediate_operands(step, part, kKernels(), scratch.intermediate(part));
    multiply_down(step, part, kKernels(), scratch);
  }
  static void combine(const StepContext& step) { cpu::combine(step, kKernels()); }

  static constexpr LayerSteps kSteps{succeed<route>,
                                     succeed<quantize>,
                                     succeed<gemm1_swiglu, const PartBuffers>,
                                     succeed<requantize, const PartBuffers>,
                                     succeed<gemm2, const PartBuffers>,
                                     succeed<combine>};
};

template <const Kernels& (*kKernels)()>
constexpr Backend make_backend(const char* name, int priority,
                               std::string (*selection)() = nullptr) {
  using Functions = Entry<kKernels>;
  return {.name = name,
          .priority = priority,
          .supports = Functions::supports,
          .packed_bytes = packed_bytes,
          .allocate = allocate_host,
          .pack_expert = pack_expert,
          .unpack_expert = unpack_expert,
          .plan = Functions::plan,
          .run = Functions::run,
          .workspace_bytes = Functions::workspace_bytes,
          .linear_bytes = linear_bytes,
          .linear_pack = linear_pack,
          .linear_workspace_bytes = Functions::linear_workspace_bytes,
          .linear_run = Functions::linear_run,
          .steps = &Functions::kSteps,
          .selection = selection};
}

std::string name_best() { return std::string("runs ") + best_kernels().backend_name; }

constexpr int kPriority = 100;
constexpr size_t kKernelsCount = std::size(kAllKernels);

template <size_t... kIndices>
auto make_forced(std::index_sequence<kIndices...>) {
  return std::array<Backend, kKernelsCount>{make_backend<forced<kIndices>>(
      kAllKernels[kIndices]->backend_name, kPriority - 1 - static_cast<int>(kIndices))...};
}

}  // namespace
}  // namespace cpu

constinit const Backend kCpuBackend =
    cpu::make_backend<cpu::best>("cpu", cpu::kPriority, cpu::name_best);

std::span<const Backend> cpu_instruction_sets() {
  static const auto backends = cpu::make_forced(std::make_index_sequence<cpu::kKernelsCount>());
  return backends;
}

}  // namespace nvfp4_moe::internal
