// What packing for activation_format fp8 adds: how weights that lie on a device become E4M3, and
// each matrix's shift in the numbers that the GEMMs read.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/packed_layout.h"
#include "core/fp8_histogram.h"

namespace nvfp4_moe::internal::cuda {

// Device memory that measure_device_source works in; 16-byte aligned.
inline constexpr int64_t kFp8CountBytes = 3 * static_cast<int64_t>(sizeof(Fp8Histogram));

// Of an expert on the device, whose block scales have been checked. Runs in source.stream, which it
// waits for.
Result<Fp8ExpertWeights> measure_device_source(const ExpertSource& source, int device,
                                               std::byte* scratch);

// Codes and block scales of an expert.
int64_t matrix_bytes(const ExpertSource& source);
// Enqueues copies of an expert's matrices from the host to `memory` on the device, matrix_bytes()
// of it; the copy's views.
Result<ExpertSource> copy_to_device(const ExpertSource& source, void* stream, std::byte* memory);

// The numbers of one expert on the device.
struct DeviceScales {
  TensorScales scales;  // times 2^shift
  Fp8Shifts shifts;
};
// kUnsupported if 2^shift takes a tensor scale out of fp32's normal numbers: alpha would be rounded
// twice.
Result<DeviceScales> device_scales(const TensorScales& scales, const Fp8ExpertWeights& fp8);

}  // namespace nvfp4_moe::internal::cuda
