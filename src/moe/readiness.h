// Readiness: which backends run on this machine, and what keeps its GPUs from being used. The
// report of `nvfp4-moe doctor` and `python -m nvfp4_moe`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/cuda_driver.h"
#include "core/status.h"
#include "moe/self_check.h"

namespace nvfp4_moe::internal {

// NVIDIA's GPUs as the system shows them without CUDA.
struct NvidiaSystem {
  int gpus = 0;        // /dev/nvidiaN, whatever CUDA_VISIBLE_DEVICES hides
  std::string driver;  // its release, "580.65.06"; empty if it is not known
};
NvidiaSystem read_nvidia_system(const std::string& root = "");
// The versions that a self-check's result holds for: "580.65.06, CUDA 13.0" and
// "0.1.0, CUDA 13.0, kernels 2a41...".
std::string driver_text();
std::string library_text();

// The backends that take a plain layer on one device.
struct DeviceBackends {
  std::string device;               // "cpu", "cuda:0"
  std::string name;                 // the model
  std::string chosen;               // empty if none takes it
  std::string note;                 // the backend's caveat, or why the GPU is too old
  std::vector<std::string> others;  // would take it if forced
  // kept self-checks that failed there: "sm100 nvfp4 swiglu failed: ..."
  std::vector<std::string> failed_checks;
};

struct Readiness {
  CudaVersions cuda;
  NvidiaSystem system;
  std::vector<DeviceBackends> devices;  // the host first
  std::string gpu_error;                // why CUDA shows no device; empty if it shows one
  // why results of self-checks that a device here needs cannot be kept; empty if they can
  std::string checks_not_kept;
};
// forced: a backend's name, or "auto".
Result<Readiness> read_readiness(const std::string& forced);

// "for CPUs only", or "with CUDA 13.0".
std::string build_text(const Readiness& readiness);
// One line: what will be used on each device, and what else works there.
std::string backends_text(const Readiness& readiness);
// One self-check of one device.
struct DeviceCheck {
  std::string device;  // "cuda:0"
  std::string scope;   // "sm90 nvfp4 swiglu"
  CheckOutcome outcome;
};
// Runs every self-check of this build's backends on the GPUs of this machine, or on one of them,
// keeps the results (moe/kept_checks.h), and passes each to `report` when it is known. After one
// that timed out the rest of that device is left out, since a kernel may still occupy it. device:
// "cuda:N", or "cpu" for all GPUs.
Status run_self_checks(const std::string& device,
                       const std::function<void(const DeviceCheck&)>& report);
// One sentence for each thing that a GPU of this machine lacks, with what to do.
std::vector<std::string> missing_for_gpus(const Readiness& readiness);

}  // namespace nvfp4_moe::internal
