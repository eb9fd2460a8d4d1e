// ComputePeak: the peak rate of this host's arithmetic units, from registers, for the instructions
// of the CPU backend's kernels. A layer's share of it shows the loss to everything else.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/executor.h"

namespace nvfp4_moe::internal::cli {

struct ComputePeak {
  const char* name;          // in reports
  const char* instructions;  // of one round of the loop, as text
  double flop;               // of one round on one thread; a multiply-add counts 2
  bool (*runs_here)();
  void (*loop)(int64_t rounds);
};

// All peaks of this build. A host supports some of them.
std::span<const ComputePeak> compute_peaks();
// The peak that bounds a kernel, by the kernel's name in plans. Null for a kernel without one
// (portable, reference), or if the host lacks the instructions.
const ComputePeak* peak_of_kernel(std::string_view kernel);

// FLOP per second of all threads together: the best of a few passes of some milliseconds.
double measure(const ComputePeak& peak, Executor& executor);

}  // namespace nvfp4_moe::internal::cli
