// The functions with which compiled host code registers and launches kernels, and queries about
// them.
#include <algorithm>
#include <cstdio>

#include "cudart/device.h"

using namespace ptxemu;

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local Configuration pushed;

cudaError_t launch_shape(const void* function, const cudaLaunchConfig_t& config, void** arguments) {
  const Lock lock(device().mutex);
  LaunchShape shape{{config.gridDim.x, config.gridDim.y, config.gridDim.z},
                    {config.blockDim.x, config.blockDim.y, config.blockDim.z},
                    {0, 0, 0},
                    config.dynamicSmemBytes};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeClusterDimension:
        shape.cluster[0] = attribute.val.clusterDim.x;
        shape.cluster[1] = attribute.val.clusterDim.y;
        shape.cluster[2] = attribute.val.clusterDim.z;
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        shape.programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
        break;
      case cudaLaunchAttributeCooperative:
        shape.cooperative = attribute.val.cooperative != 0;
        break;
      case cudaLaunchAttributeIgnore:
      case cudaLaunchAttributePriority:
      case cudaLaunchAttributeAccessPolicyWindow:
      case cudaLaunchAttributePreferredClusterDimension:
      case cudaLaunchAttributeClusterSchedulingPolicyPreference: break;
      default:
        std::fprintf(stderr, "ptxemu: launch attribute %d is not supported\n",
                     static_cast<int>(attribute.id));
        return noted(cudaErrorNotSupported);
    }
  }
  return noted(launch(find_kernel(function), shape, arguments, config.stream));
}

int occupancy(const void* function, int threads, size_t dynamic_bytes) {
  KernelFacts facts{};
  Kernel* kernel = find_kernel(function);
  if (!kernel || kernel_facts(kernel, &facts) != cudaSuccess) return 0;
  return resident_ctas(static_cast<uint32_t>(threads), facts.static_shared_bytes + dynamic_bytes);
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* fatbin) {
  return reinterpret_cast<void**>(add_module(fatbin));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** module, const char* function, char*, const char* name, int,
                            uint3*, uint3*, dim3*, dim3*, int*) {
  add_kernel(reinterpret_cast<Module*>(module), function, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return launch_shape(function, {grid, block, shared, stream, nullptr, 0}, arguments);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared,
                          stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return launch_shape(function, *config, arguments);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                        void** arguments, size_t shared, cudaStream_t stream) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  return launch_shape(function, {grid, block, shared, stream, &cooperative, 1}, arguments);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const Lock lock(device().mutex);
  Kernel* kernel = find_kernel(function);
  if (!kernel) return noted(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed)
    allow_non_portable_clusters(kernel, value != 0);
  return noted(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize
                   ? set_dynamic_shared(kernel, value)
                   : cudaSuccess);
}
cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
// Registers are not modelled: every kernel reports 64.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const Lock lock(device().mutex);
  KernelFacts facts{};
  Kernel* kernel = find_kernel(function);
  const cudaError_t error = kernel ? kernel_facts(kernel, &facts) : cudaErrorInvalidDeviceFunction;
  if (error != cudaSuccess) return noted(error);
  *attributes = {};
  attributes->sharedSizeBytes = facts.static_shared_bytes;
  attributes->maxThreadsPerBlock = static_cast<int>(facts.max_threads);
  attributes->maxDynamicSharedSizeBytes = 49152;
  attributes->numRegs = 64;
  attributes->ptxVersion = facts.ptx_version;
  attributes->binaryVersion = compute_capability();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* ctas, const void* function,
                                                                   int threads,
                                                                   size_t dynamic_bytes, unsigned) {
  *ctas = occupancy(function, threads, dynamic_bytes);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, const void* function,
                                                          int threads, size_t dynamic_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(ctas, function, threads,
                                                                dynamic_bytes, 0);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  int size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      size =
          static_cast<int>(config->attrs[i].val.clusterDim.x * config->attrs[i].val.clusterDim.y *
                           config->attrs[i].val.clusterDim.z);
  const int threads =
      static_cast<int>(config->blockDim.x * config->blockDim.y * config->blockDim.z);
  *clusters = occupancy(function, threads, config->dynamicSmemBytes) * multiprocessors() / size;
  return cudaSuccess;
}

}  // extern "C"
