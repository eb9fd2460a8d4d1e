// The self-check of a GPU backend: small layers whose sums are exact (exact_layer.h), through each
// GEMM configuration that a layer's plan can choose, compared with the plain `cuda` kernels on the
// same device. A right kernel has the same bits.
//
// Three layers run. Two have long sums, one in gemm1 and one in gemm2. They run in each
// configuration with two tokens on all multiprocessors, and with rows that fill its tiles on fewer,
// so that each CTA has whole tiles and a part of one that is split along K. A third, tiny one has
// more tokens than one CTA routes. They include the runs that are one launch. Together the layers
// have rows in bf16 and in fp32, biases, router weights after and before down, and a shared expert,
// whose rows are read like those of a linear.
//
// Not covered:
// - kernels that the check shares with `cuda`: route, combine, router weights on input, vllm_order
//   and static scales
// - more than 65,536 assignments
// - sums of values that are not exact, and races that the check happens to win
// - rows of a shared expert or a linear in tiles that are split along K, or of a middle size
// - on Hopper, tiles of 64 and more rows that are split along K
#pragma once

#include <chrono>
#include <string>

#include "backend/backend.h"

namespace nvfp4_moe::internal {

// The kernels that one check covers: those of layers with these properties.
struct CheckScope {
  const Backend* backend = nullptr;
  ActivationFormat format = ActivationFormat::kNvfp4;
  Activation activation = Activation::kSwiglu;
  bool batch_invariant = false;

  static CheckScope of(const Backend& backend, const MoeConfig& config);
  // "sm100 nvfp4 swiglu", with " batch_invariant" at the end if it is.
  std::string name() const;
};

struct CheckOutcome {
  enum class Verdict { kPassed, kFailed, kTimedOut, kError };
  Verdict verdict = Verdict::kPassed;
  // StepPlan::kernel of the first step that failed, as describe_run names it; "cuda: ..." if it is
  // one of the plain kernels. If the device's error or the time limit does not show the step, it is
  // that of gemm1. Empty if all passed, if memory was not enough, if no kernel began, or if time
  // ran out before the first one had ended.
  std::string kernel;
  // One sentence: the step, the coordinates and both values, or the device's error.
  std::string difference;
  // The different steps that ran and were compared, route and combine too. Two are different if
  // describe_run reports another step or another kernel.
  int step_variants = 0;
  double milliseconds = 0;

  bool of_plain_kernel() const { return kernel.starts_with(kPlainKernel); }
  static constexpr const char* kPlainKernel = "cuda: ";
};

// Blocks until the check has ended, for `limit` at most and up to 200 ms more in which it frees its
// memory. It uses a thread and a non-blocking stream of its own, so it neither waits for a caller's
// stream nor disturbs a capture. After kTimedOut the thread and its memory are left alone, since a
// kernel that hangs cannot be ended.
CheckOutcome run_self_check(const CheckScope& scope, const DeviceFacts& device,
                            std::chrono::milliseconds limit);

}  // namespace nvfp4_moe::internal
