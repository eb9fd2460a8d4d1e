// CUDA's versions, and what is wrong with a driver that cannot run this build. Host code only: it
// compiles in every build.
#pragma once

#include <string>

namespace nvfp4_moe::internal {

// As CUDA numbers them: 13000 is 13.0.
struct CudaVersions {
  int runtime = 0;  // linked into this build; 0 if it has no CUDA backends
  int driver = 0;   // the newest that the driver supports; 0 if there is no driver
};

// Asks CUDA's run time and the driver, without initializing a device. Zeros in a build without
// CUDA.
CudaVersions cuda_versions();

// Identifies the sources of the CUDA kernels and the compiler. Empty in a build without CUDA.
const char* cuda_kernels_id();

inline std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The oldest driver of a run time's major version (CUDA's minor version compatibility).
inline std::string oldest_driver(int runtime) {
  switch (runtime / 1000) {
    case 12: return "driver 525";
    case 13: return "driver 580";
    default: return "a driver that supports CUDA " + std::to_string(runtime / 1000) + ".0";
  }
}

// One sentence if the driver is missing or older than the run time's major version, which CUDA
// reports as the same error. Empty otherwise. release: the driver's own version, if known.
inline std::string driver_problem(const CudaVersions& versions, const std::string& release = "") {
  if (versions.driver / 1000 >= versions.runtime / 1000) return "";
  const std::string needed = "this build's CUDA " + cuda_version_text(versions.runtime) +
                             " needs " + oldest_driver(versions.runtime) + " or later";
  if (versions.driver == 0)
    return "no NVIDIA driver is found (libcuda.so.1), and " + needed +
           ": install it, or start the container with its GPUs";
  return "the NVIDIA driver" + (release.empty() ? "" : " " + release) + " supports CUDA up to " +
         cuda_version_text(versions.driver) + ", and " + needed + ": update the driver";
}

}  // namespace nvfp4_moe::internal
