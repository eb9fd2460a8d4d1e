// ComputePeak: what the arithmetic units of this host do at most, in registers, with the
// instructions that the CPU backend's kernels are made of. A share of it says how much a layer
// loses to everything else.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/executor.h"

namespace nvfp4_moe::internal::cli {

struct ComputePeak {
  const char* name;          // in reports
  const char* instructions;  // of one round of the loop, in words
  double flop;               // of one round on one thread; a multiply-add counts 2
  bool (*runs_here)();
  void (*loop)(int64_t rounds);
};

// Those of this build; a host runs some of them.
std::span<const ComputePeak> compute_peaks();
// The peak that bounds a kernel, by the kernel's name in plans; null for a kernel without one
// (portable, reference) and where the host lacks it.
const ComputePeak* peak_of_kernel(std::string_view kernel);

// FLOP per second of all threads at once: the best of a few passes of some milliseconds.
double measure(const ComputePeak& peak, Executor& executor);

}  // namespace nvfp4_moe::internal::cli
