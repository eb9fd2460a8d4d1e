// Additional packing work for activation_format fp8: how weights on a device become E4M3, and
// applying each matrix's shift to the numbers that the GEMMs read.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/packed_layout.h"
#include "core/fp8_histogram.h"

namespace nvfp4_moe::internal::cuda {

// Device scratch memory for measure_device_source; 16-byte aligned.
inline constexpr int64_t kFp8CountBytes = 3 * static_cast<int64_t>(sizeof(Fp8Histogram));

// For an expert on the device whose block scales have been checked. Runs in source.stream and waits
// for it.
Result<Fp8ExpertWeights> measure_device_source(const ExpertSource& source, int device,
                                               std::byte* scratch);

// Bytes of an expert's codes and block scales.
int64_t matrix_bytes(const ExpertSource& source);
// Enqueues copies of an expert's matrices from the host to `memory` (matrix_bytes()) on the device.
// Returns views of the copy.
Result<ExpertSource> copy_to_device(const ExpertSource& source, void* stream, std::byte* memory);

// The numbers of one expert in device memory.
struct DeviceScales {
  TensorScales scales;  // times 2^shift
  Fp8Shifts shifts;
};
// kUnsupported if 2^shift moves a tensor scale out of fp32's normal range: alpha would be rounded
// twice.
Result<DeviceScales> device_scales(const TensorScales& scales, const Fp8ExpertWeights& fp8);

}  // namespace nvfp4_moe::internal::cuda
