#include "backend/sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <string>

#include "backend/cuda/device/check.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  cudaError_t error;

  Encoder() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
    error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                             cudaEnableDefault, &how);
    if (error == cudaSuccess && how != cudaDriverEntryPointSuccess) error = cudaErrorSymbolNotFound;
    if (error == cudaSuccess) encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }
};
const Encoder& encoder() {
  static const Encoder found;
  return found;
}

}  // namespace

Status find_tensor_map_encoder() { return cuda::check(encoder().error, "cuTensorMapEncodeTiled"); }

Result<CUtensorMap> rows_map(const std::byte* x, int64_t count, int64_t row_bytes, int tile_rows,
                             int tile_bytes) {
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(tile_bytes),
                              static_cast<cuuint32_t>(tile_rows)},
                   steps[2] = {1, 1};
  const CUresult result = encoder().encode(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<std::byte*>(x), sizes, strides, tile,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return map;
  return Status(Code::kInternal, "cuTensorMapEncodeTiled: expected a map of (" +
                                     std::to_string(count) + ", " + std::to_string(row_bytes) +
                                     ") bytes, got driver error " + std::to_string(result));
}

}  // namespace nvfp4_moe::internal::sm90
