// Host: facts about this machine for `doctor` and `bench`, read from /proc and /sys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::cli {

struct HostFacts {
  std::string cpu;
  std::string system;                         // "Linux 6.1.0 x86_64"
  int threads = 1;                            // cores this process may use
  uint64_t memory_bytes = 0;                  // the machine's memory
  uint64_t memory_available_bytes = 0;        // available without swapping
  uint64_t memory_limit_bytes = 0;            // of this process's control group; 0 if there is none
  double cpu_limit_cores = 0;                 // quota of the control group; 0 if there is none
  std::vector<std::string> instruction_sets;  // relevant to matrix kernels
};
HostFacts read_host();

struct GpuFacts {
  std::string name;
  std::string driver;
  std::string memory;  // from nvidia-smi; empty if only /proc lists the GPU
};
std::vector<GpuFacts> read_gpus();

// Whether a program of that name is on PATH.
bool on_path(const std::string& program);

}  // namespace nvfp4_moe::internal::cli
