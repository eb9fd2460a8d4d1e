// Compares a backend's kernels with those of `cuda` on the device that will run them.
#pragma once

#include <chrono>
#include <string>

#include "backend/backend.h"

namespace nvfp4_moe::internal {

struct CheckScope {  // the kernels that one check covers: those of layers with these properties
  const Backend* backend = nullptr;
  ActivationFormat format = ActivationFormat::kNvfp4;
  Activation activation = Activation::kSwiglu;
  bool batch_invariant = false;
  static CheckScope of(const Backend& backend, const MoeConfig& config);
  std::string name() const;  // "sm100 nvfp4 swiglu", a key of kept results
};

struct CheckOutcome {
  enum class Verdict { kPassed, kFailed, kTimedOut, kError };
  Verdict verdict = Verdict::kPassed;
  std::string kernel;      // the first that failed; empty if all passed
  std::string difference;  // one sentence
  int kernels = 0;         // that ran
  double milliseconds = 0;
};

CheckOutcome run_self_check(const CheckScope& scope, const DeviceFacts& device,
                            std::chrono::milliseconds limit);

}  // namespace nvfp4_moe::internal
