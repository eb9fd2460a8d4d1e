#include "support/backends.h"

#include <algorithm>
#include <type_traits>

#include "moe/layer.h"
#include "moe/registry.h"
#include "support/sizes.h"

namespace nvfp4_moe::internal::test {
namespace {

// A parameter does not give access to its backend.
static_assert(!std::is_convertible_v<BackendParam, const Backend*>);
static_assert(!std::is_convertible_v<KernelsParam, const cpu::Kernels*>);
// Nor does a BackendTest accept a list of bare pointers.
static_assert(!std::is_convertible_v<const Backend*, BackendParam>);

template <class T>
concept MakesParametrizedTests = requires {
  sizeof(::testing::WithParamInterface<T>);
};
static_assert(MakesParametrizedTests<BackendParam> && MakesParametrizedTests<KernelsParam>);
static_assert(!MakesParametrizedTests<const Backend*> &&
              !MakesParametrizedTests<const cpu::Kernels*>);

// "cpu:avx2" as the name of a test: cpu_avx2.
std::string test_name(std::string name) {
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

std::string first_device(const Backend& backend) {
  return backend.memory == nullptr ? "cpu" : "cuda:0";
}

// The registry's backends, in its order, without "cpu": that is the best of its instruction sets,
// which are listed themselves.
template <class Wanted>
std::vector<BackendParam> registered(Wanted wanted) {
  std::vector<BackendParam> list;
  for (const Backend* backend : backends())
    if (backend != &kCpuBackend && backend->steps != nullptr && wanted(*backend))
      list.emplace_back(*backend);
  return list;
}

}  // namespace

template <>
std::string HardwareParam<Backend>::name() const {
  return test_name(value_->name);
}
template <>
std::string HardwareParam<cpu::Kernels>::name() const {
  return test_name(value_->backend_name);
}

std::string why_not_here(const Backend& backend) {
  const MoeOptions plain = test::sizes_of(2, 1, 64, 64);
  const auto device = device_facts(first_device(backend));
  return device.ok() ? backend.supports(*MoeConfig::make(plain), *device).message()
                     : device.status().message();
}

std::string why_not_here(const cpu::Kernels& kernels) {
  return kernels.runs_on_host() ? "" : std::string("this host lacks ") + kernels.requires_text;
}

bool declines(const Backend& backend, const MoeConfig& config) {
  const auto device = device_facts(first_device(backend));
  return !device.ok() || !backend.supports(config, *device).ok();
}

// Looked up by name, since a build without CUDA has no sm90.
bool has_fp8_tensor_cores(const Backend& backend) { return &backend == find_backend("sm90"); }

std::vector<BackendParam> step_backends() {
  return registered([](const Backend&) { return true; });
}
std::vector<BackendParam> judged_backends() {
  return registered([](const Backend& backend) { return &backend != &kReferenceBackend; });
}
std::vector<BackendParam> host_backends() {
  return registered([](const Backend& backend) { return backend.memory == nullptr; });
}
std::vector<BackendParam> device_backends() {
  return registered([](const Backend& backend) { return backend.memory != nullptr; });
}

std::vector<BackendParam> instruction_set_backends() {
  std::vector<BackendParam> list;
  for (const Backend& backend : cpu_instruction_sets()) list.emplace_back(backend);
  return list;
}
std::vector<KernelsParam> instruction_sets() {
  std::vector<KernelsParam> list;
  for (const cpu::Kernels* kernels : cpu::kAllKernels) list.emplace_back(*kernels);
  return list;
}

std::vector<const Backend*> runnable_backends() {
  std::vector<const Backend*> list(backends().begin(), backends().end());
  std::erase_if(list, [](const Backend* backend) {
    return backend->memory != nullptr || !why_not_here(*backend).empty();
  });
  return list;
}

}  // namespace nvfp4_moe::internal::test
