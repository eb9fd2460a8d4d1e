// The part of the driver's interface that programs look up by name, and a small interface to load
// and launch PTX texts.
#include <cstring>

#include "cudart/device.h"
#include "cudart/targets.h"
#include "runtime/memory_map.h"
#include "runtime/tensor_map.h"

namespace ptxemu {

// Checks the rules that the driver's documentation states.
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                           void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                           const cuuint32_t* box, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap made{};
  if (!map || reinterpret_cast<uint64_t>(map) % 64 || rank < 1 || rank > 5 ||
      reinterpret_cast<uint64_t>(address) % 16 || static_cast<int>(type) > 15)
    return CUDA_ERROR_INVALID_VALUE;
  made.address = reinterpret_cast<uint64_t>(address);
  made.magic = TensorMap::kMagic;
  made.type = static_cast<uint8_t>(type);
  made.rank = static_cast<uint8_t>(rank);
  made.interleave = static_cast<uint8_t>(interleave);
  made.swizzle = static_cast<uint8_t>(swizzle);
  made.fill = static_cast<uint8_t>(fill);
  made.promotion = static_cast<uint8_t>(promotion);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 ||
        element_strides[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    made.dims[i] = static_cast<uint32_t>(dims[i]);
    made.box[i] = static_cast<uint16_t>(box[i]);
    made.element_strides[i] = 1;
    if (i + 1 == rank) break;
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
    made.strides[i] = strides[i];
  }
  static constexpr uint32_t kMostBytes[] = {1u << 30, 32, 64, 128};
  if (static_cast<int>(swizzle) > 3 || made.row_bytes() % 16 ||
      made.row_bytes() > kMostBytes[swizzle])
    return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace ptxemu

using namespace ptxemu;

extern "C" {

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return encode_tensor_map(map, type, rank, address, dims, strides, box, element_strides,
                           interleave, swizzle, promotion, fill);
}
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  std::memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

// Plants this fault in the emulator from now on ("": none). Returns false if it was built without
// planted faults, or the fault is unknown.
bool ptxemu_plant(const char* name) {
#ifdef PTXEMU_PLANT
  planted_fault = Fault::kNone;
  if (!*name) return true;
#define PLANTED(fault, what) \
  if (!std::strcmp(name, #fault)) planted_fault = Fault::fault;
#include "runtime/planted.def"
#undef PLANTED
  return planted_fault != Fault::kNone;
#else
  return !*name;
#endif
}

CUresult cuModuleLoadData(CUmodule* module, const void* ptx) {
  const Target target = target_of(static_cast<const char*>(ptx));
  const int cc = compute_capability();
  if (!runs_on(target, cc) && !planted(Fault::targets_unchecked))
    return static_cast<CUresult>(
        refused(cudaErrorNoKernelImageForDevice, "",
                "PTX for " + target.name() + " does not run on compute capability " +
                    std::to_string(cc / 10) + "." + std::to_string(cc % 10) + ": it requires " +
                    target.devices()));
  *module = reinterpret_cast<CUmodule>(add_module_text(static_cast<const char*>(ptx)));
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Kernel* kernel = find_kernel(reinterpret_cast<Module*>(module), name);
  KernelFacts facts;
  const cudaError_t error = kernel_facts(kernel, &facts);
  *function = reinterpret_cast<CUfunction>(kernel);
  return static_cast<CUresult>(error);
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
    allow_non_portable_clusters(reinterpret_cast<Kernel*>(function), value != 0);
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  return static_cast<CUresult>(set_dynamic_shared(reinterpret_cast<Kernel*>(function), value));
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                          void**) {
  const Lock lock(device().mutex);
  LaunchShape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                    {config->blockDimX, config->blockDimY, config->blockDimZ},
                    {0, 0, 0},
                    config->sharedMemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      shape.cluster[0] = attribute.value.clusterDim.x;
      shape.cluster[1] = attribute.value.clusterDim.y;
      shape.cluster[2] = attribute.value.clusterDim.z;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      shape.programmatic = attribute.value.programmaticStreamSerializationAllowed != 0;
    } else {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return static_cast<CUresult>(launch(reinterpret_cast<Kernel*>(function), shape, arguments,
                                      reinterpret_cast<cudaStream_t>(config->hStream)));
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const struct {
    const char* name;
    void* function;
  } known[] = {{"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&cuTensorMapEncodeTiled)},
               {"cuTensorMapReplaceAddress", reinterpret_cast<void*>(&cuTensorMapReplaceAddress)},
               {"cuGetErrorString", reinterpret_cast<void*>(&cuGetErrorString)}};
  *function = nullptr;
  for (const auto& one : known)
    if (std::strcmp(name, one.name) == 0) *function = one.function;
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

}  // extern "C"
