// Copies one token of each run of a layer to pinned host memory, in stream order: its inputs and
// its row of out. A thread of the host checks it later (moe/row_check.h).
//
// A kernel after the run chooses the token and the slot, so a replay of a graph samples as an eager
// run does, and another token each time. Run n takes slot n % kSampleSlots. If the host has not
// released that slot yet, the run is counted as dropped, even if other slots are free.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "core/batch.h"

namespace nvfp4_moe::internal {

inline constexpr int kSampleSlots = 8;

// A slot: this head, then the arrays of SampleLayout. The device writes everything but `released`.
struct Sample {
  uint64_t written;   // the sampled run, counted from 1; written last
  uint64_t released;  // the run whose sample the host no longer needs
  uint64_t replaced;  // the last replacement of an expert before this run
  int64_t token;
  DType hidden_dtype, ids_dtype, out_dtype;
  bool has_shared_weight;
  float shared_weight;
};

// Offsets in a slot, in bytes.
struct SampleLayout {
  int64_t hidden = 64;     // (hidden_size) of hidden_dtype, at most 4 bytes each
  int64_t out = 0;         // (hidden_size) of out_dtype, the same
  int64_t ids = 0;         // (top_k) of ids_dtype
  int64_t weights = 0;     // (top_k) fp32
  int64_t slot_bytes = 0;  // a multiple of 64

  static SampleLayout of(int64_t hidden_size, int64_t top_k) {
    SampleLayout layout;
    layout.out = layout.hidden + hidden_size * 4;
    layout.ids = layout.out + hidden_size * 4;
    layout.weights = layout.ids + (top_k * 8 + 63) / 64 * 64;
    layout.slot_bytes = layout.weights + (top_k * 4 + 63) / 64 * 64;
    return layout;
  }
};
static_assert(sizeof(Sample) <= 64);

// The samples of one layer. Its destructor calls close.
class RowSampler {
 public:
  virtual ~RowSampler() = default;
  // Enqueues the copy of one token of the run that was enqueued in `stream` before it. The batch
  // has tokens.
  virtual Status sample(const Batch& batch, void* stream) = 0;
  // Enqueues in `stream` that later runs come after that replacement. Null and at_rest: waits until
  // it is noted; no work of the device is in flight.
  virtual Status note_replacement(uint64_t number, void* stream, bool at_rest) = 0;
  // Makes the device current in the calling thread, for good. Call it once in the thread that calls
  // is_busy and unpack: otherwise they would make device 0 current again when they return, which
  // creates a context there.
  virtual void enter_thread() = 0;
  // Whether the device has not run a small kernel within 100 ms, so that unpack might wait long.
  virtual bool is_busy() = 0;
  // Backend::unpack_expert without allocating on the device, in a stream that no other stream waits
  // for. Called by one thread at a time.
  virtual Status unpack(const PackedWeights& weights, int64_t local_expert,
                        decltype(Backend::unpack_expert) unpack_expert, ExpertBuffers& out) = 0;
  // Frees the device memory, for which CUDA waits until kernels in flight have ended. After it only
  // `slots` may be called, and has the samples of all runs that were enqueued before.
  virtual void close() = 0;
  // The slots in host memory, slot_bytes apart.
  virtual std::byte* slots() const = 0;
  // The number of dropped runs. Copies it from the device.
  virtual Result<uint64_t> dropped() const = 0;
};

struct DeviceSampling {
  // Allocates pinned memory for the slots and device memory for unpacking. The weights must outlive
  // the sampler.
  Result<std::unique_ptr<RowSampler>> (*open)(const PackedWeights& weights);
};

extern const DeviceSampling
    kCudaSampling;  // in builds with NVFP4_MOE_WITH_CUDA; all CUDA backends share it

}  // namespace nvfp4_moe::internal
