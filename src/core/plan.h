// Plan: everything decided on the host before running, and the workspace it implies.
//
// A Plan is a pure function of config x range x limits x device facts: printable, comparable, without pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe {

struct Limits {
  int64_t max_tokens = 0;
  bool operator==(const Limits&) const = default;
};

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct DeviceFacts {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;               // N of "cuda:N"
  std::string name;            // "AMD EPYC", "NVIDIA H200"
  int compute_units = 1;       // threads or SMs
  int64_t memory_bytes = 0;    // total memory of the device
  int compute_capability = 0;  // of a CUDA device: 90 for 9.0
  bool operator==(const DeviceFacts&) const = default;
};

// The named spans of a workspace. add() both measures and places: there is no second walk.
class WorkspaceLayout {
 public:
  static constexpr size_t kAlignment = 256;
  struct Span {
    std::string name;
    size_t offset_bytes = 0;
    size_t size_bytes = 0;
    bool operator==(const Span&) const = default;
  };
  // Appends a span; offsets are multiples of kAlignment. Returns its index.
  // guard_bytes_ (tests only) lie between all spans.
  int add(std::string name, size_t size_bytes);
  explicit WorkspaceLayout(size_t guard_bytes = 0) : guard_bytes_(guard_bytes) {}
  const std::vector<Span>& spans() const { return spans_; }
  const Span& span(int index) const { return spans_[static_cast<size_t>(index)]; }
  size_t total_bytes() const { return total_bytes_; }
  bool operator==(const WorkspaceLayout&) const = default;

 private:
  std::vector<Span> spans_;
  size_t total_bytes_ = 0;
  size_t guard_bytes_ = 0;
};

struct StepPlan {
  std::string step;    // "route", "quantize", "gemm1_swiglu", "requantize", "gemm2", "combine"
  std::string kernel;  // name of the compiled configuration
  bool operator==(const StepPlan&) const = default;
};

struct Plan {
  std::string backend;
  Limits limits;
  std::vector<StepPlan> steps;
  WorkspaceLayout workspace;
  bool operator==(const Plan&) const = default;
};
std::string to_string(const Plan& plan);  // several lines, for `explain`

// Caller's bytes seen through a plan's layout. Borrowed. Base must be 256-byte aligned.
class Workspace {
 public:
  static Result<Workspace> make(void* base, size_t size_bytes, const WorkspaceLayout& layout);
  template <class T>
  T* at(int span_index) const {
    return reinterpret_cast<T*>(base_ + layout_->span(span_index).offset_bytes);
  }
  std::byte* base() const { return base_; }

 private:
  Workspace(std::byte* base, const WorkspaceLayout* layout) : base_(base), layout_(layout) {}
  std::byte* base_;
  const WorkspaceLayout* layout_;
};

}  // namespace nvfp4_moe
