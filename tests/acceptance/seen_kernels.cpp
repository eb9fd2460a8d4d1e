#include "acceptance/seen_kernels.h"

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <tuple>

namespace nvfp4_moe::internal::acceptance {
namespace {

struct Launched {
  const void* function;
  int threads;
  size_t dynamic_shared_bytes;
  cudaError_t error;
};

// Kernels are registered before main, so these are created on first use.
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> all;
  return all;
}
std::vector<Launched>& launches() {
  static std::vector<Launched> all;
  return all;
}

void add_launch(const void* function, dim3 threads, size_t shared_bytes, cudaError_t error) {
  const int count = static_cast<int>(threads.x * threads.y * threads.z);
  for (Launched& one : launches())
    if (std::tie(one.function, one.threads, one.dynamic_shared_bytes) ==
        std::tie(function, count, shared_bytes)) {
      if (one.error == cudaSuccess) one.error = error;
      return;
    }
  launches().push_back({function, count, shared_bytes, error});
}

std::string demangled(const std::string& mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  const std::string name = status == 0 ? text : mangled;
  std::free(text);
  return name;
}

}  // namespace

std::vector<SeenKernel> seen_kernels() {
  std::vector<SeenKernel> all;
  for (const Launched& one : launches()) {
    SeenKernel kernel;
    kernel.name = demangled(names()[one.function]);
    kernel.threads = one.threads;
    kernel.dynamic_shared_bytes = one.dynamic_shared_bytes;
    kernel.launch = one.error == cudaSuccess ? "ok" : cudaGetErrorString(one.error);
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, one.function) == cudaSuccess) {
      kernel.registers = attributes.numRegs;
      kernel.static_shared_bytes = static_cast<int>(attributes.sharedSizeBytes);
      kernel.local_bytes = static_cast<int>(attributes.localSizeBytes);
      kernel.max_threads = attributes.maxThreadsPerBlock;
      kernel.binary_version = attributes.binaryVersion;
      kernel.ptx_version = attributes.ptxVersion;
    }
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&kernel.ctas_per_multiprocessor, one.function,
                                                  one.threads, one.dynamic_shared_bytes);
    all.push_back(kernel);
  }
  cudaGetLastError();  // 0 if the query failed
  return all;
}

}  // namespace nvfp4_moe::internal::acceptance

extern "C" {
void __real___cudaRegisterFunction(void** module, const char* function, char* device_function,
                                   const char* name, int threads, uint3* thread, uint3* cta,
                                   dim3* cta_size, dim3* grid_size, int* warp);
void __wrap___cudaRegisterFunction(void** module, const char* function, char* device_function,
                                   const char* name, int threads, uint3* thread, uint3* cta,
                                   dim3* cta_size, dim3* grid_size, int* warp) {
  nvfp4_moe::internal::acceptance::names()[function] = name;
  __real___cudaRegisterFunction(module, function, device_function, name, threads, thread, cta,
                                cta_size, grid_size, warp);
}

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                       void** arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                       void** arguments) {
  const cudaError_t error = __real_cudaLaunchKernelExC(config, function, arguments);
  nvfp4_moe::internal::acceptance::add_launch(function, config->blockDim, config->dynamicSmemBytes,
                                              error);
  return error;
}

cudaError_t __real_cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments,
                                    size_t shared, cudaStream_t stream);
cudaError_t __wrap_cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments,
                                    size_t shared, cudaStream_t stream) {
  const cudaError_t error =
      __real_cudaLaunchKernel(function, grid, threads, arguments, shared, stream);
  nvfp4_moe::internal::acceptance::add_launch(function, threads, shared, error);
  return error;
}
}
