// Plan: everything decided on the host before running, and the workspace it implies.
//
// A Plan is a pure function of config x range x limits x device facts: printable, comparable,
// without pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/arena.h"
#include "core/enum_names.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct Limits {
  int64_t max_tokens = 0;
  // For tests:
  size_t guard_bytes = 0;  // between a workspace's arrays
  int gemm_config = -1;    // GEMM configuration of routed experts; -1: the run plan's
  // Whether a run of few tokens may be one kernel whose ctas wait for each other.
  bool one_launch = true;
  bool operator==(const Limits&) const = default;
};

enum class DeviceKind : uint8_t { kCpu, kCuda };
const char* to_string(DeviceKind);  // as a device's name begins: "cpu", "cuda"
template <>
struct EnumNames<DeviceKind> {
  static constexpr const char* kWhat = "device";
  static constexpr std::array kAll = {"cpu", "cuda"};
};

struct DeviceFacts {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;             // N of "cuda:N"
  std::string name;          // "AMD EPYC", "NVIDIA H200"
  int compute_units = 1;     // threads or SMs
  int64_t memory_bytes = 0;  // total memory of the device
  // For CUDA devices:
  int compute_capability = 0;  // 90 for 9.0
  int cta_shared_bytes = 0;    // shared memory that one thread block may ask for
  std::string uuid;            // 32 hexadecimal digits; empty if it is not known
  bool operator==(const DeviceFacts&) const = default;
};

// The arrays of a workspace in the order of their walk, with names.
struct WorkspaceLayout {
  std::vector<Span> spans;
  size_t total_bytes = 0;

  // The layout that a measuring arena gets from `walk`.
  template <class Walk>
  static WorkspaceLayout of(const Walk& walk, size_t guard_bytes = 0) {
    WorkspaceLayout layout;
    Arena arena(nullptr, guard_bytes, &layout.spans);
    walk(arena);
    layout.total_bytes = arena.size_bytes();
    return layout;
  }
  bool operator==(const WorkspaceLayout&) const = default;
};

struct StepPlan {
  std::string step;    // "route", "quantize", "gemm1_swiglu", "requantize", "gemm2", "combine";
                       // "layer": all of them in one kernel
  std::string kernel;  // name of the compiled configuration
  bool operator==(const StepPlan&) const = default;
};

struct Plan {
  std::string backend;
  Limits limits;
  DeviceFacts device;
  std::vector<StepPlan> steps;
  WorkspaceLayout workspace;  // of a run of limits.max_tokens
  bool operator==(const Plan&) const = default;
};
std::string to_string(const Plan& plan);  // several lines, for `explain`

// kInvalidArgument unless `base` has at least needed_bytes and is a multiple of Arena::kAlignment.
Status check_workspace(const void* base, size_t size_bytes, size_t needed_bytes);

}  // namespace nvfp4_moe::internal
