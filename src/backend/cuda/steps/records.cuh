// What home and owner share of the records' kernels: where records lie, and copies by a CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/device_records.h"

namespace nvfp4_moe::cuda {

inline constexpr int kRecordThreads = 128;              // of the CTA that a record has
inline constexpr uint32_t kOverflowed = 1, kWrong = 2;  // why a run's out is NaN

// Record `record` of all messages; it is of rank's.
__device__ inline std::byte* record_at(const RecordLayout& layout, std::byte* messages, int64_t rank, int64_t record) {
  return messages + record * layout.record.bytes + (rank + 1) * layout.header_bytes;
}
// The header of rank's message, whose first record is first_record of all.
__device__ inline MessageHeader* header_at(const RecordLayout& layout, std::byte* messages, int64_t rank,
                                           int64_t first_record) {
  return reinterpret_cast<MessageHeader*>(record_at(layout, messages, rank - 1, first_record));
}

// By a CTA of kRecordThreads.
__device__ inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto misaligned = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  if (misaligned % 16 == 0) {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kRecordThreads)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else if (misaligned % 8 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 8; i += kRecordThreads)
      reinterpret_cast<uint2*>(to)[i] = reinterpret_cast<const uint2*>(from)[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += kRecordThreads) to[i] = from[i];
  }
}

}  // namespace nvfp4_moe::cuda
