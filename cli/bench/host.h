// Host: what this machine is, as far as `doctor` and `bench` need to know it. Read from /proc and
// /sys; nothing is set.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::cli {

struct HostFacts {
  std::string cpu;
  std::string system;                         // "Linux 6.1.0 x86_64"
  int threads = 1;                            // cores this process may use
  uint64_t memory_bytes = 0;                  // of the machine
  uint64_t memory_available_bytes = 0;        // of it, without making anyone swap
  uint64_t memory_limit_bytes = 0;            // of this process's control group; 0 if there is none
  double cpu_limit_cores = 0;                 // quota of the control group; 0 if there is none
  std::vector<std::string> instruction_sets;  // those that matter to matrix kernels
};
HostFacts read_host();

struct GpuFacts {
  std::string name;
  std::string driver;
  std::string memory;  // as nvidia-smi says it; empty if only /proc knows the GPU
};
std::vector<GpuFacts> read_gpus();

// Whether PATH has a program of that name.
bool on_path(const std::string& program);

}  // namespace nvfp4_moe::internal::cli
