#include "moe/registry.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "backend/cuda_driver.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal {
namespace {

// Highest priority first. To add a backend, add it here.
std::vector<const Backend*> list_backends() {
  std::vector<const Backend*> list;
#ifdef NVFP4_MOE_WITH_CUDA
  list.push_back(&kSm100Backend);
  list.push_back(&kSm120Backend);
  list.push_back(&kSm90Backend);
  list.push_back(&kCudaBackend);
#endif
  list.push_back(&kCpuBackend);
  for (const Backend& backend : cpu_instruction_sets()) list.push_back(&backend);
  list.push_back(&kReferenceBackend);
  return list;
}

// This build's tables for a kind of device. All null for hosts, and if there is no such backend.
struct DeviceTables {
  const DeviceMemory* memory = nullptr;
  const DeviceFormats* formats = nullptr;
  const DeviceRouter* router = nullptr;
  const DeviceRanks* ranks = nullptr;
  const DevicePeers* peers = nullptr;
  const DevicePackets* packets = nullptr;
  const DeviceReplacement* replacement = nullptr;
  const DeviceSampling* sampling = nullptr;
  const DeviceStreams* streams = nullptr;
};

DeviceTables tables_of([[maybe_unused]] DeviceKind kind) {
#ifdef NVFP4_MOE_WITH_CUDA
  if (kind == DeviceKind::kCuda)
    return {kCudaBackend.memory, kCudaBackend.formats, kCudaBackend.router,
            &kCudaRanks,         &kCudaPeers,          &kCudaPackets,
            &kCudaReplacement,   &kCudaSampling,       &kCudaStreams};
#endif
  return {};
}

// "model name" of /proc/cpuinfo; aarch64 kernels do not have it.
std::string cpu_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  // so that running out of memory is not mistaken for the end of the file
  cpuinfo.exceptions(std::ios::badbit);
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "host";
}

}  // namespace

std::span<const Backend* const> backends() {
  static const std::vector<const Backend*> list = list_backends();
  return list;
}

const Backend* find_backend(std::string_view name) {
  for (const Backend* backend : backends()) {
    if (name == backend->name) return backend;
  }
  return nullptr;
}

std::string expected_backend(const std::string& name) {
  std::string text = "expected one of " + backend_names() + ", got \"" + name + "\"";
#ifndef NVFP4_MOE_WITH_CUDA
  if (name == "cuda" || name.starts_with("sm"))
    text += "; this build has no CUDA backend: build it with nvcc 12.9 or later on PATH";
#endif
  return text;
}

std::string backend_names() {
  std::string names = "auto";
  for (const Backend* backend : backends()) names += std::string(", ") + backend->name;
  return names;
}

std::vector<std::string> backend_notes(const Backend& backend, ActivationFormat format) {
  std::vector<std::string> notes;
  if (backend.caveat != nullptr) notes.emplace_back(backend.caveat);
  if (backend.fp8_caveat != nullptr && format == ActivationFormat::kFp8)
    notes.emplace_back(backend.fp8_caveat);
  return notes;
}

Result<std::string> forced_backend(const std::string& option, const Env& env,
                                   const char* option_name) {
  const bool from_variable = option == "auto" && !env.backend.empty();
  const std::string& name = from_variable ? env.backend : option;
  if (name == "auto" || find_backend(name) != nullptr) return name;
  return invalid_argument(
      std::string(from_variable ? "environment NVFP4_MOE_BACKEND" : option_name) + ": " +
      expected_backend(name));
}

DeviceFacts host_facts() {
  DeviceFacts facts;
  facts.kind = DeviceKind::kCpu;
  facts.name = cpu_name();
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  facts.compute_units =
      std::max(1, known ? CPU_COUNT(&allowed) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  facts.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return facts;
}

const DeviceMemory* device_memory(DeviceKind kind) { return tables_of(kind).memory; }
const DeviceFormats* device_formats(DeviceKind kind) { return tables_of(kind).formats; }
const DeviceRouter* device_router(DeviceKind kind) { return tables_of(kind).router; }
const DeviceRanks* device_ranks(DeviceKind kind) { return tables_of(kind).ranks; }
const DevicePeers* device_peers(DeviceKind kind) { return tables_of(kind).peers; }
const DevicePackets* device_packets(DeviceKind kind) { return tables_of(kind).packets; }
const DeviceReplacement* device_replacement(DeviceKind kind) { return tables_of(kind).replacement; }
const DeviceSampling* device_sampling(DeviceKind kind) { return tables_of(kind).sampling; }
const DeviceStreams* device_streams(DeviceKind kind) { return tables_of(kind).streams; }

#ifndef NVFP4_MOE_WITH_CUDA
CudaVersions cuda_versions() { return {}; }
const char* cuda_kernels_id() { return ""; }
#endif

std::optional<int> gpu_index(const std::string& device) {
  const std::string index = device.rfind("cuda:", 0) == 0 ? device.substr(5)
                            : device == "cuda"            ? "0"
                                                          : "";
  const bool digits =
      !index.empty() && index.size() <= 4 && index.find_first_not_of("0123456789") == index.npos;
  return digits ? std::optional<int>(std::stoi(index)) : std::nullopt;
}

Result<DeviceFacts> device_facts(const std::string& device) {
  if (device == "cpu") return host_facts();
  const std::optional<int> index = gpu_index(device);
  if (!index) return invalid_argument("device: expected cpu or cuda:N, got " + device);
#ifdef NVFP4_MOE_WITH_CUDA
  return cuda_device_facts(*index);
#else
  return unsupported("device " + device +
                     ": this build has no CUDA backend; build it with nvcc 12.9 or later on PATH");
#endif
}

}  // namespace nvfp4_moe::internal
