// The device's properties, and its errors.
#include "cudart/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "runtime/memory_map.h"

namespace ptxemu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
const pid_t first_process = getpid();

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

struct Generation {
  int major;
  const char* name;
  int shared_optin, shared_per_multiprocessor, threads_per_multiprocessor, ctas_per_multiprocessor;
};
const Generation& generation() {
  static constexpr Generation kKnown[] = {{8, "emulated A100", 166912, 167936, 2048, 32},
                                          {9, "emulated H100", 232448, 233472, 2048, 32},
                                          {10, "emulated B200", 232448, 233472, 2048, 32},
                                          {12, "emulated RTX PRO", 101376, 102400, 1536, 24}};
  for (const Generation& one : kKnown)
    if (one.major == compute_capability() / 10) return one;
  std::fprintf(stderr, "ptxemu: PTXEMU_CC: expected 8.x, 9.0, 10.x or 12.x\n");
  std::abort();
}

}  // namespace

Device& device() {
  static auto* const one = new Device;  // outlives other statics
  return *one;
}

// "9.0" or "90". Read at each call, so that one process can test several devices.
int compute_capability() {
  const char* text = std::getenv("PTXEMU_CC");
  if (!text || !*text) return 90;
  const char* point = std::strchr(text, '.');
  return point ? std::atoi(text) * 10 + std::atoi(point + 1) : std::atoi(text);
}
int multiprocessors() {
  static const int asked = std::max(1, number("PTXEMU_SMS", 8));
  return asked;
}

int resident_ctas(uint32_t threads, uint64_t shared_bytes) {
  const Generation& one = generation();
  const uint64_t by_threads = static_cast<uint64_t>(one.threads_per_multiprocessor) /
                              std::max(1u, (threads + 31) / 32 * 32);
  const uint64_t by_shared =
      static_cast<uint64_t>(one.shared_per_multiprocessor) / (shared_bytes + kSharedBase);
  return static_cast<int>(
      std::min({by_threads, by_shared, static_cast<uint64_t>(one.ctas_per_multiprocessor)}));
}

int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount: return multiprocessors();
    case cudaDevAttrComputeCapabilityMajor: return compute_capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return compute_capability() % 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return generation().shared_optin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return generation().shared_per_multiprocessor;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrReservedSharedMemoryPerBlock: return kSharedBase;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return generation().threads_per_multiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return generation().ctas_per_multiprocessor;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 0x7fffffff;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrClockRate: return 1000000;
    case cudaDevAttrMemoryClockRate: return 1000000;
    case cudaDevAttrGlobalMemoryBusWidth: return 4096;
    case cudaDevAttrClusterLaunch: return compute_capability() >= 90;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrIpcEventSupport:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrAsyncEngineCount: return 1;
    default: return 0;
  }
}

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
bool forked() { return getpid() != first_process; }

Capture* Device::capture_of(cudaStream_t stream) {
  const auto found = captures.find(stream);
  return found == captures.end() ? nullptr : found->second.get();
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool Device::capture_forbids() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  bool forbidden = false;
  for (auto& [stream, capture] : captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (capture->mode == cudaStreamCaptureModeThreadLocal ||
                thread_mode == cudaStreamCaptureModeThreadLocal
            ? own
            : true) {
      capture->invalid = true;
      forbidden = true;
    }
  }
  return forbidden;
}

}  // namespace ptxemu

using namespace ptxemu;

#define LOCKED const Lock lock(device().mutex)

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = forked() ? 0 : 1;
  return noted(forked() ? cudaErrorInitializationError : cudaSuccess);
}
cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  return noted(index == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaInitDevice(int index, unsigned, unsigned) { return cudaSetDevice(index); }
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  LOCKED;
  if (device().capture_forbids()) return noted(cudaErrorStreamCaptureUnsupported);
  return noted(device().drain());
}
cudaError_t cudaDeviceReset() {
  LOCKED;
  device().drain();
  device().broken = cudaSuccess;
  device().failure.clear();
  last_error = cudaSuccess;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int index) {
  if (index != 0) return noted(cudaErrorInvalidDevice);
  *value = attribute(which);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  if (index != 0) return noted(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "%s", generation().name);
  properties->major = compute_capability() / 10;
  properties->minor = compute_capability() % 10;
  properties->multiProcessorCount = multiprocessors();
  properties->totalGlobalMem = kDeviceBytes;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = static_cast<size_t>(generation().shared_optin);
  properties->sharedMemPerMultiprocessor =
      static_cast<size_t>(generation().shared_per_multiprocessor);
  properties->reservedSharedMemPerBlock = kSharedBase;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = generation().threads_per_multiprocessor;
  properties->maxBlocksPerMultiProcessor = generation().ctas_per_multiprocessor;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 4096;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->clusterLaunch = compute_capability() >= 90;
  properties->canMapHostMemory = 1;
  properties->cooperativeLaunch = properties->unifiedAddressing = properties->concurrentKernels = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* properties, int index) {
  return cudaGetDeviceProperties(properties, index);
}
// A made-up PCI address.
constexpr char kPciAddress[] = "0000:01:00.0";
cudaError_t cudaDeviceGetPCIBusId(char* address, int length, int index) {
  if (address == nullptr || length < static_cast<int>(sizeof kPciAddress))
    return noted(cudaErrorInvalidValue);
  if (index != 0) return noted(cudaErrorInvalidDevice);
  std::snprintf(address, static_cast<size_t>(length), "%s", kPciAddress);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* index, const char* address) {
  if (index == nullptr || address == nullptr) return noted(cudaErrorInvalidValue);
  if (std::strcmp(address, kPciAddress) != 0) return noted(cudaErrorInvalidDevice);
  *index = 0;
  return cudaSuccess;
}
// There is only one device, so it has no peers.
cudaError_t cudaDeviceCanAccessPeer(int* can, int index, int peer) {
  *can = 0;
  return noted(index == 0 && peer == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return noted(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceDisablePeerAccess(int) { return noted(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

#define NAMES(each)                                                                               \
  each(cudaSuccess) each(cudaErrorInvalidValue) each(cudaErrorMemoryAllocation)                   \
      each(cudaErrorInitializationError) each(cudaErrorInvalidConfiguration)                      \
          each(cudaErrorInvalidDevice) each(cudaErrorInvalidDeviceFunction)                       \
              each(cudaErrorInvalidClusterSize) each(cudaErrorNoKernelImageForDevice)             \
                  each(cudaErrorInvalidPtx) each(cudaErrorSymbolNotFound) each(cudaErrorNotReady) \
                      each(cudaErrorIllegalAddress) each(cudaErrorLaunchFailure)                  \
                          each(cudaErrorNotSupported) each(cudaErrorInvalidResourceHandle)        \
                              each(cudaErrorStreamCaptureUnsupported)                             \
                                  each(cudaErrorStreamCaptureInvalidated)                         \
                                      each(cudaErrorStreamCaptureImplicit)                        \
                                          each(cudaErrorIllegalState)                             \
                                              each(cudaErrorCooperativeLaunchTooLarge)            \
                                                  each(cudaErrorMapBufferObjectFailed)

const char* cudaGetErrorName(cudaError_t error) {
#define NAME(name) \
  if (error == name) return #name;
  NAMES(NAME)
#undef NAME
  return "a CUDA error";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorInitializationError: return "initialization error";
    default: return cudaGetErrorName(error);
  }
}

// The two functions that CUDA does not have: the report of the launch that failed, "" if none did,
// and this library's version.
const char* ptxemu_last_report() { return device().failure.c_str(); }
const char* ptxemu_version() { return PTXEMU_VERSION; }

}  // extern "C"
