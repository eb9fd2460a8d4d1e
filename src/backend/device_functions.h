// Library functions on arrays in device memory, with the same bits as on the host: the formats
// (docs/explanation/format.md; core/quantize.h, core/dequantize.h, core/activation.h,
// core/scale_layout.h) and a router (core/router_gemm.h, core/router.h).
//
// Each enqueues its kernels in `stream` and returns. It allocates nothing, does not synchronize,
// and can be captured. It therefore cannot report invalid numbers in an array: if the host function
// returns an error, the device writes a NaN scale.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/dtype.h"
#include "core/router.h"
#include "core/router_gemm.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

enum class DeviceQuantizer : int { kWeights, kWeightsMse, kDynamicToken, kPowerOfTwo, kVllmOrder };

struct DeviceQuantize {
  DeviceQuantizer how = DeviceQuantizer::kDynamicToken;
  const void* x = nullptr;  // (rows, cols) of an activation dtype
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;                 // a multiple of 16
  float tensor_scale = 0.0f;        // kWeights: 0 means amax / 2688 of x; unused by kDynamicToken
  uint8_t* codes = nullptr;         // (rows, cols/2), 8-byte aligned
  uint8_t* block_scales = nullptr;  // (rows, cols/16)
  // kDynamicToken: (rows), NaN for a row that contains NaN or Inf. Otherwise (1), the scale that
  // was used; NaN if x contains NaN or Inf.
  float* scales = nullptr;
};

struct DeviceDequantize {
  const uint8_t* codes = nullptr;         // (rows, cols/2)
  const uint8_t* block_scales = nullptr;  // (rows, cols/16); bytes above 0x7E give NaN
  const float* scales = nullptr;          // (1), or (rows) if scale_of_row; null: tensor_scale
  bool scale_of_row = false;
  float tensor_scale = 1.0f;
  int64_t rows = 0;
  int64_t cols = 0;
  DType out_dtype = DType::kBf16;
  void* out = nullptr;  // (rows, cols)
};

struct DeviceSwigluQuantize {
  GatedActivation activation;
  GateUp input;
  const float* row_weights = nullptr;  // (rows), or null
  float power_of_two = 0.0f;           // 0: each row gets its own scale
  QuantizedRows out;                   // codes 8-byte aligned
};

struct DeviceFormats {
  Status (*quantize)(int device, const DeviceQuantize& call, void* stream);
  Status (*dequantize)(int device, const DeviceDequantize& call, void* stream);
  Status (*swiglu_quantize)(int device, const DeviceSwigluQuantize& call, void* stream);
  // `matrices` matrices of (rows, scale_cols), contiguous, each swizzled separately; padding is
  // zero.
  Status (*swizzle)(int device, const uint8_t* linear, int64_t matrices, int64_t rows,
                    int64_t scale_cols, uint8_t* swizzled, void* stream);
  Status (*unswizzle)(int device, const uint8_t* swizzled, int64_t matrices, int64_t rows,
                      int64_t scale_cols, uint8_t* linear, void* stream);
};

struct DeviceRouter {
  // Precondition: as for router_gemm on the host.
  Status (*router_gemm)(int device, const RouterGemm& call, void* stream);
  // Precondition: as for select_experts on the host. bad_ids is in device memory too.
  Status (*select_experts)(int device, const SelectExperts& call, void* stream);
};

}  // namespace nvfp4_moe::internal
