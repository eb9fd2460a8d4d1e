// The backends and instruction sets that a test runs over. A machine runs some of them and skips
// the others by name.
//
// Only this file decides that: the lists hold parameters that only HardwareTest can open, after
// checking the machine. Another fixture over `const Backend*` or `const cpu::Kernels*` does not
// compile.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"

namespace nvfp4_moe::internal::test {

// Empty if this machine runs it (Backend::supports or Kernels::runs_on_host decides), else the
// reason.
std::string why_not_here(const Backend& backend);
std::string why_not_here(const cpu::Kernels& kernels);
// Whether it declines this layer, by name, on this host or its first device: then the case is for
// other backends.
bool declines(const Backend& backend, const MoeConfig& config);
// Whether it computes fp8 on FP8 tensor cores, which add with 13 bits.
bool has_fp8_tensor_cores(const Backend& backend);

template <class T>
class HardwareTest;

// One backend or instruction set as the parameter of a test.
template <class T>
class HardwareParam {
 public:
  explicit HardwareParam(const T& value) : value_(&value) {}
  // "cpu_avx2": for names of tests.
  std::string name() const;
  friend void PrintTo(const HardwareParam& param, std::ostream* out) { *out << param.name(); }

 private:
  friend class HardwareTest<T>;
  const T* value_;
};
using BackendParam = HardwareParam<Backend>;
using KernelsParam = HardwareParam<cpu::Kernels>;
template <>
std::string HardwareParam<Backend>::name() const;
template <>
std::string HardwareParam<cpu::Kernels>::name() const;

// The base of every test over them. If this machine does not run the parameter, the test is skipped
// with the reason.
template <class T>
class HardwareTest : public ::testing::TestWithParam<HardwareParam<T>> {
 protected:
  void SetUp() final {
    const T& value = *this->GetParam().value_;
    const std::string reason = why_not_here(value);
    if (!reason.empty()) GTEST_SKIP() << this->GetParam().name() << ": " << reason;
    checked_ = &value;
  }
  // Throws before SetUp: a fixture's constructor does not know the machine yet.
  const T& checked() const {
    if (checked_ == nullptr)
      throw std::logic_error("a test's backend was asked for before SetUp examined the machine");
    return *checked_;
  }

 private:
  const T* checked_ = nullptr;
};

class BackendTest : public HardwareTest<Backend> {
 protected:
  const Backend& backend() const { return checked(); }
};
class KernelsTest : public HardwareTest<cpu::Kernels> {
 protected:
  const cpu::Kernels& kernels() const { return checked(); }
};

// Every backend of the registry that consists of steps; "cpu" as its instruction sets.
std::vector<BackendParam> step_backends();
// The same without the reference: the ones to compare with it.
std::vector<BackendParam> judged_backends();
// Those of step_backends in host memory, and those on devices.
std::vector<BackendParam> host_backends();
std::vector<BackendParam> device_backends();
// The CPU's instruction sets, the best first, as backends and as their tables of functions.
std::vector<BackendParam> instruction_set_backends();
std::vector<KernelsParam> instruction_sets();

template <class T>
std::string hardware_test_name(const ::testing::TestParamInfo<HardwareParam<T>>& info) {
  return info.param.name();
}

// For other kinds of tests that loop over the backends they can open: the registry's that this host
// runs in host memory, in its order.
std::vector<const Backend*> runnable_backends();

inline constexpr ActivationFormat kActivationFormats[] = {
    ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kInt8Block,
    ActivationFormat::kFp8};

// Activation formats that every cuda backend declines.
inline bool is_of_hosts(ActivationFormat format) { return format == ActivationFormat::kInt8Block; }

inline bool is_of_hosts(const MoeOptions& options) {
  return is_of_hosts(options.activation_format);
}

// The facts that `explain` has for a GPU of this compute capability (90 for 9.0).
inline DeviceFacts gpu_of(int compute_capability) {
  DeviceFacts facts;
  facts.kind = DeviceKind::kCuda;
  facts.name = "a GPU";
  facts.compute_capability = compute_capability;
  return facts;
}

}  // namespace nvfp4_moe::internal::test

// Declared and never defined, so that no fixture bypasses HardwareTest.
template <>
class testing::WithParamInterface<const nvfp4_moe::internal::Backend*>;
template <>
class testing::WithParamInterface<const nvfp4_moe::internal::cpu::Kernels*>;
