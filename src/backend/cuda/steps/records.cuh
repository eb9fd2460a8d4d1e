// What home and owner share of the records' kernels: where records lie, and copies by a CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/device_records.h"

namespace nvfp4_moe::cuda {

inline constexpr int kRecordThreads = 128;                               // of the CTA that a record has
inline constexpr uint32_t kOverflowed = 1, kWrong = 2, kPeerIsLate = 4;  // why a run's out is NaN

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

// A token of the home as a record for the rank that has slots [first, end). By a CTA of kRecordThreads.
struct RecordOfToken {
  const WireRecord& record;
  const WireArray (&arrays)[kWireArrays];
  const int32_t* slots;  // (T, k)
  const float* weights;  // (T, k)

  // None of the token's slots is the rank's.
  __device__ void put_none(std::byte* to) const {
    for (int64_t k = threadIdx.x; k < record.top_k; k += kRecordThreads) put_slot(to, k, -1, 0);
  }
  __device__ void put(std::byte* to, int64_t token, int32_t first, int32_t end, int32_t first_row) const {
    const int64_t assignment = token * record.top_k;
    for (int64_t k = threadIdx.x; k < record.top_k; k += kRecordThreads) {
      const int32_t slot = slots[assignment + k];
      const bool own = slot >= first && slot < end;
      put_slot(to, k, own ? slot : -1, own ? weights[assignment + k] : 0);
    }
    if (threadIdx.x == 0) *reinterpret_cast<int32_t*>(to + record.first_row_at) = first_row;
    int64_t offset = 0;
#pragma unroll
    for (const WireArray& array : arrays) {
      const auto* const row = static_cast<const std::byte*>(array.rows) + token * array.row_bytes;
      if (array.row_bytes > 0) copy_bytes(to + offset, row, array.row_bytes);
      offset += array.row_bytes;
    }
    for (int64_t i = offset + threadIdx.x; i < record.slots_at; i += kRecordThreads) to[i] = std::byte{0};
    for (int64_t i = record.first_row_at + 4 + threadIdx.x; i < record.bytes; i += kRecordThreads) to[i] = std::byte{0};
  }

 private:
  __device__ void put_slot(std::byte* to, int64_t k, int32_t slot, float weight) const {
    reinterpret_cast<int32_t*>(to + record.slots_at)[k] = slot;
    reinterpret_cast<float*>(to + record.weights_at)[k] = weight;
  }
};

}  // namespace nvfp4_moe::cuda
