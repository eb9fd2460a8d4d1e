// The kernels that this program launches, with the driver's attributes of each. The linker
// redirects every registration and launch to this file (room.cmake).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::acceptance {

struct SeenKernel {
  std::string name;  // demangled, with template arguments
  int threads = 0;   // per cta
  size_t dynamic_shared_bytes = 0;
  std::string launch;  // "ok", or CUDA's words of the first failure
  int registers = 0, static_shared_bytes = 0, local_bytes = 0, max_threads = 0;
  int binary_version = 0, ptx_version = 0;  // 90 for 9.0; 0 if the driver does not report it
  int ctas_per_multiprocessor = 0;          // at once, limited by registers, threads and memory
};

// One for each kernel, cta size and amount of shared memory, in the order of their first launches.
std::vector<SeenKernel> seen_kernels();

}  // namespace nvfp4_moe::internal::acceptance
