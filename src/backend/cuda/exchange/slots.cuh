// Maps an id to one of its expert's slots (backend/device_exchange.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/device_exchange.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr int32_t kNoSlot = -1,
                         // kNoSlot: id -1; kNoExpert: an invalid id
    kNoExpert = -2;

__device__ inline int64_t id_of(const SlotsOfIds& call, int64_t assignment) {
  return call.ids_dtype == DType::kI64
             ? static_cast<int64_t>(static_cast<const long long*>(call.ids)[assignment])
             : static_cast<int64_t>(static_cast<const int32_t*>(call.ids)[assignment]);
}
__device__ inline bool is_no_expert(const SlotsOfIds& call, int64_t id) {
  return id < -1 || id >= call.num_experts;
}

// The slot of a token's assignment k. Writes it and counts it.
__device__ inline int32_t put_slot(const SlotsOfIds& call, int64_t token, int64_t k) {
  const int64_t assignment = token * call.top_k + k, id = id_of(call, assignment);
  int32_t slot = is_no_expert(call, id) ? kNoExpert : kNoSlot;
  if (id >= 0 && id < call.num_experts) {
    const int32_t first = call.first_of_expert[id], count = call.first_of_expert[id + 1] - first;
    const auto turn = static_cast<int32_t>(count == 1 ? 0 : (call.source + token + k) % count);
    slot = call.slots_of_expert[first + turn];
    atomicAdd(reinterpret_cast<unsigned long long*>(call.load + id), 1ull);
  }
  call.slots[assignment] = slot;
  return slot;
}

}  // namespace nvfp4_moe::internal::cuda
