// What a rank of several does on a device besides its own layer: ids to slots before it, and what all ranks add behind it.
//
// Each enqueues in `stream` and returns: it allocates nothing, waits for nothing, and can be captured.
#pragma once

#include <cstdint>

#include "core/batch.h"
#include "core/status.h"

namespace nvfp4_moe {

// ids (tokens, top_k) -> slots, and load (num_experts) += how often each expert was chosen. An expert's slots take turns:
// assignment k of token t has turn home + t + k (exchange/placement.h). -1 stays -1; another id that is no expert's is -2.
struct SlotsOfIds {
  const void* ids = nullptr;  // (tokens, top_k)
  DType ids_dtype = DType::kI64;
  int64_t tokens = 0, top_k = 0, num_experts = 0, home = 0;
  const int32_t* first_of_expert = nullptr;  // (num_experts + 1) where an expert's slots begin below
  const int32_t* slots_of_expert = nullptr;  // (slots)
  int32_t* slots = nullptr;                  // (tokens, top_k)
  uint64_t* load = nullptr;                  // (num_experts)
};

// parts (ranks, count) fp32 -> out (count): added in the order of the ranks, rounded once to out's dtype.
struct SumOfRanks {
  const float* parts = nullptr;
  int64_t ranks = 0, count = 0;  // count: a multiple of 8
  void* out = nullptr;
  DType out_dtype = DType::kBf16;
};

// The last step of a sum over the ranks: *nonfinite = how many of values are NaN or Inf. If the ranks' link has failed, the
// sum is made of whatever was there; then all values become NaN first.
struct CheckSum {
  void* values = nullptr;  // (count)
  DType dtype = DType::kBf16;
  int64_t count = 0;  // a multiple of 8
  const uint32_t* link_failed =
      nullptr;                    // (1) in host memory: not 0 once the link has failed; null: it has no such word
  uint64_t* nonfinite = nullptr;  // (1)
};

struct DeviceRanks {
  Status (*slots_of_ids)(int device, const SlotsOfIds& call, void* stream);
  Status (*sum_of_ranks)(int device, const SumOfRanks& call, void* stream);
  Status (*check_sum)(int device, const CheckSum& call, void* stream);
  // A mark behind what the stream has been given: *mark, or where that is null a new one. Not for a stream that is being
  // captured.
  Status (*set_mark)(int device, void** mark, void* stream);
  // Whether the device has come to it; does not wait, and ends nobody's capture. Any thread.
  Result<bool> (*mark_reached)(int device, void* mark);
  void (*drop_mark)(int device, void* mark);
  // A word in pinned host memory, 0, and where the device reaches it. The host sets it without a call of CUDA's: one would wait
  // while another thread's launch waits for room in a queue that is stuck.
  Status (*make_host_word)(int device, uint32_t** word, uint32_t** on_device);
  void (*drop_host_word)(int device, uint32_t* word);
  // Calls body(argument) with the device as the thread's current one: for libraries that take it from there.
  Status (*on_device)(int device, Status (*body)(void* argument), void* argument);
};

extern const DeviceRanks kCudaRanks;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe
