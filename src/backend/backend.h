// Backend: the contract every backend fills in. One const table per architecture, no inheritance.
//
// pack -> plan -> run. pack may allocate and fail; plan is pure; run only computes (or enqueues):
// it never allocates, waits, reads files or takes locks, and what could fail has failed before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/buffer.h"
#include "core/config.h"
#include "core/executor.h"
#include "core/fp8.h"
#include "core/nvfp4_view.h"
#include "core/plan.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct Backend;
struct DeviceFormats;  // backend/device_functions.h
struct DeviceRouter;   // backend/device_functions.h
struct LayerSteps;

// The local index that names the shared expert (MoeOptions::shared_intermediate_size > 0).
inline constexpr int64_t kSharedExpert = -1;

// Tensor scales of one expert; they enter the fp32 accumulators as alphas and are never folded into
// block scales.
struct TensorScales {
  float gate = 1.0f;
  float up = 1.0f;
  float down = 1.0f;
  bool operator==(const TensorScales&) const = default;
};

// fp8: how the weights of one expert become E4M3.
struct Fp8ExpertWeights {
  Fp8Weights gate, up, down;
  bool operator==(const Fp8ExpertWeights&) const = default;
};

// The codes of a block whose scale is 0, if they are not all 0. They multiply nothing: a layout may
// store zeros there and keep them here, for unpack.
struct ZeroScaleCodes {
  int projection = 0;  // 0 gate, 1 up, 2 down
  int64_t block = 0;   // row * (cols / 16) + block of the row
  std::array<uint8_t, 8> codes{};
};

// A layer's local experts in one backend's layout. Complete once every expert is packed; moe/
// guarantees that.
struct PackedWeights {
  MoeConfig config;
  ExpertRange range;
  LayerScales scales;
  std::vector<TensorScales>
      tensor_scales;  // (range.count), and one more at the end for the shared expert
  Buffer bytes;       // Backend::packed_bytes long, in the backend's layout
  int device = 0;     // index of the device that holds bytes; 0 in host memory
  // Like tensor_scales; empty if the layout keeps all codes itself.
  std::vector<std::vector<ZeroScaleCodes>> zero_scale_codes = {};
  // State that pack_expert keeps from one expert to the next. The caller frees it when done.
  Buffer staging = {};
  // Like tensor_scales, written by pack_expert; empty unless activation_format is fp8.
  std::vector<Fp8ExpertWeights> fp8_weights = {};

  const TensorScales& tensor_scales_of(int64_t local_expert) const {
    return tensor_scales[index_of(local_expert)];
  }
  TensorScales& tensor_scales_of(int64_t local_expert) {
    return tensor_scales[index_of(local_expert)];
  }
  // Zeros, which no other format reads, if there are none.
  Fp8ExpertWeights fp8_weights_of(int64_t local_expert) const {
    return fp8_weights.empty() ? Fp8ExpertWeights{} : fp8_weights[index_of(local_expert)];
  }
  size_t index_of(int64_t local_expert) const {
    return static_cast<size_t>(local_expert == kSharedExpert ? range.count : local_expert);
  }
};

// Checkpoint-layout arrays of one matrix, contiguous: what unpack fills.
struct Nvfp4Buffers {
  std::vector<uint8_t> codes;         // (rows, cols/2)
  std::vector<uint8_t> block_scales;  // (rows, cols/16)
};
struct ExpertBuffers {
  Nvfp4Buffers gate, up, down;
  TensorScales scales;
  std::vector<float> gate_bias, up_bias,
      down_bias;  // (I), (I), (H), or empty if the expert has none
};

struct RunContext {
  Executor* executor = nullptr;  // host backends; never null there
  void* stream = nullptr;        // device backends
  // device backends: where the run writes its report; null: into the workspace
  RunStatus* status = nullptr;
};

// A dense NVFP4 linear y = x W^T: W (rows, cols) = (out_features, in_features).
struct LinearWeights {
  int64_t rows = 0;
  int64_t cols = 0;
  float tensor_scale = 1.0f;
  ActivationFormat activation_format = ActivationFormat::kNvfp4;
  ActivationScale activation_scale = ActivationScale::kDynamicToken;
  float input_scale = 0.0f;  // static: a power of two; compat: the checkpoint's number; else unused
  Fp8Weights fp8;            // written by linear_pack under fp8
  Buffer bytes;              // Backend::linear_bytes long
  int device = 0;            // index of the device that holds bytes; 0 in host memory
  DeviceFacts facts;         // of that device
};
struct LinearBatch {
  int64_t tokens = 0;
  const void* x = nullptr;  // (tokens, cols)
  DType x_dtype = DType::kBf16;
  void* out = nullptr;  // (tokens, rows)
  DType out_dtype = DType::kBf16;
};

// Bytes between host memory and a device's. They return once the bytes are there and all earlier
// work of the stream is done: for loading, for what a run reports, and for tests.
struct DeviceMemory {
  Status (*to_device)(int device, void* to, const void* from, size_t size_bytes, void* stream);
  Status (*to_host)(int device, void* to, const void* from, size_t size_bytes, void* stream);
  Status (*synchronize)(int device);  // waits for all work of the device
  // A number of its own for the graph that the stream is being captured into; 0 if it is not.
  Result<uint64_t> (*capture_id)(void* stream);
  Result<Buffer> (*allocate)(size_t size_bytes, int device, const char* purpose);
  // (rows, row_bytes) from rows stride_bytes apart to rows that follow each other, both on the
  // device. Only enqueues.
  Status (*gather_rows)(int device, void* to, const void* from, int64_t rows, int64_t row_bytes,
                        int64_t stride_bytes, void* stream);
};

// Device timers and peak rates, for `bench`.
struct DeviceMeasures {
  // Captures what `enqueue` puts into its stream as one graph and replays it for that many seconds,
  // at least five times and not more than most_replays otherwise. The microseconds of each replay,
  // by the device's clock.
  Result<std::vector<double>> (*time_graph)(int device,
                                            const std::function<Status(void* stream)>& enqueue,
                                            double seconds, int64_t most_replays);
  // Bytes per second that all multiprocessors together read from memory, out of a buffer that no
  // cache holds.
  Result<double> (*read_rate)(int device);
  // FLOP per second of the tensor cores in bf16, by the instruction that the backend's GEMMs are
  // made of.
  Result<double> (*product_rate)(int device);
  const char* product_instruction;
};

struct Backend {
  const char* name;
  int priority;  // the highest that supports a layer is chosen; ties do not occur

  // Ok, or kUnsupported with the reason in words a user can act on.
  Status (*supports)(const MoeConfig& config, const DeviceFacts& device);

  size_t (*packed_bytes)(const MoeConfig& config, const ExpertRange& range);
  // Memory for packed weights and workspaces, aligned to 256 bytes, on the device of that index
  // (host backends: 0). purpose: what it is for, "packed weights of layer 12", which kOutOfMemory
  // says beside what was asked and free.
  Result<Buffer> (*allocate)(size_t size_bytes, int device, const char* purpose);
  // Writes one expert's codes and block scales into weights.bytes and its tensor scales into
  // weights.tensor_scales. Returns once it is packed, and the source may go. Host arrays have been
  // checked before (moe/); those of a source on the device, which only backends with `memory` take,
  // are checked here, kBadInput before anything is written.
  Status (*pack_expert)(PackedWeights& weights, int64_t local_expert, const ExpertSource& source);
  // The source back, bit for bit, tensor scales included.
  Status (*unpack_expert)(const PackedWeights& weights, int64_t local_expert, ExpertBuffers& out);

  Result<Plan> (*plan)(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales,
                       const Limits& limits, const DeviceFacts& device);
  // Preconditions (checked by moe/, not here): batch.tokens <= limits, pointers and dtypes valid.
  // workspace: workspace_bytes of batch.tokens, at a multiple of Arena::kAlignment.
  // batch.selection: null but for backends with `memory`, which do it first.
  Status (*run)(const PackedWeights& weights, const Plan& plan, const Batch& batch,
                std::byte* workspace, const RunContext& context);
  // The workspace of a run of that many tokens; more tokens never need less. Cheap enough for every
  // run.
  size_t (*workspace_bytes)(const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                            int64_t tokens);

  // A run of that many tokens, one entry for each step. null: the plan holds for every run.
  std::vector<StepPlan> (*describe_run)(const MoeConfig& config, const ExpertRange& range,
                                        const Plan& plan, int64_t tokens) = nullptr;

  // A dense linear; null, all four, if the backend has none.
  size_t (*linear_bytes)(int64_t rows, int64_t cols);
  Status (*linear_pack)(LinearWeights& weights, const Nvfp4View& source);
  size_t (*linear_workspace_bytes)(const LinearWeights& weights,
                                   int64_t tokens);  // grows with them; cheap
  Status (*linear_run)(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                       const RunContext& context);

  const LayerSteps*
      steps;  // the same layer, one step at a time; null if it is not made of these steps

  // null: weights, workspaces and batches lie in host memory.
  const DeviceMemory* memory = nullptr;

  // What it selected on this host, for `explain`; null if there is nothing to select.
  std::string (*selection)() = nullptr;

  // A short warning to users; null: none.
  const char* caveat = nullptr;
  // The same of its accumulation under fp8; null: it is that of the other formats.
  const char* fp8_caveat = nullptr;

  // null: a host's clock and threads measure it.
  const DeviceMeasures* measures = nullptr;

  // null: the host's functions (core/) are all there is.
  const DeviceFormats* formats = nullptr;
  const DeviceRouter* router = nullptr;
};

// The backends of this build, defined by their own folders and listed once in moe/registry.cpp.
extern const Backend kReferenceBackend;
extern const Backend kCpuBackend;
extern const Backend
    kCudaBackend;  // in builds with NVFP4_MOE_WITH_CUDA, as those of single architectures
extern const Backend kSm90Backend;
extern const Backend kSm100Backend;
extern const Backend kSm120Backend;
// The same backend with its instruction set forced, named "cpu:NAME", the best first; a host runs
// some of them.
std::span<const Backend> cpu_instruction_sets();

// The CUDA device of that index; kUnsupported, with the driver's words, if there is none. In builds
// with CUDA.
Result<DeviceFacts> cuda_device_facts(int index);

// ---- biases of routed experts
//
// A backend keeps them after its matrices, in the same memory, so that whatever keeps or maps
// packed weights has them too: (E, 2 I + H) fp32, gate, up and down of one expert after the other;
// (E, I + H) without a gate; nothing without expert_biases. The copies are parameters, since the
// memory may be a device's.

inline size_t biases_of_one(const MoeConfig& config) {
  return static_cast<size_t>(gate_rows(config->activation, config->intermediate_size) +
                             config->intermediate_size + config->hidden_size);
}
inline size_t packed_biases_bytes(const MoeConfig& config, const ExpertRange& range) {
  return config->expert_biases
             ? static_cast<size_t>(range.count) * biases_of_one(config) * sizeof(float)
             : 0;
}

// at: bytes of what lies before them, a multiple of 16. None of the shared expert.
inline ExpertBiases packed_biases(const PackedWeights& weights, size_t at, int64_t local_expert) {
  const MoeConfig& config = weights.config;
  if (!config->expert_biases || local_expert == kSharedExpert) return {};
  const auto* first = reinterpret_cast<const float*>(weights.bytes.data() + at) +
                      static_cast<size_t>(local_expert) * biases_of_one(config);
  const float* up = first + gate_rows(config->activation, config->intermediate_size);
  return {up == first ? nullptr : first, up, up + config->intermediate_size};
}

// How biases get into packed bytes and out of them: copy(to, from, bytes), a Status. This is for a
// host's memory.
struct CopyInHostMemory {
  Status operator()(void* to, const void* from, size_t bytes) const {
    std::memcpy(to, from, bytes);
    return {};
  }
};

template <class Copy = CopyInHostMemory>
Status store_biases(PackedWeights& weights, size_t at, int64_t local_expert,
                    const ExpertBiases& source, const Copy& copy = {}) {
  const ExpertBiases to = packed_biases(weights, at, local_expert);
  const auto inner = static_cast<size_t>(weights.config->intermediate_size),
             hidden = static_cast<size_t>(weights.config->hidden_size);
  const auto store = [&](const float* into, const float* from,
                         size_t count) {  // into our own writable bytes
    return into == nullptr ? Status() : copy(const_cast<float*>(into), from, count * sizeof(float));
  };
  NVFP4_MOE_TRY(store(to.gate, source.gate, inner));
  NVFP4_MOE_TRY(store(to.up, source.up, inner));
  return store(to.down, source.down, hidden);
}

template <class Copy = CopyInHostMemory>
Status unpack_biases(const PackedWeights& weights, size_t at, int64_t local_expert,
                     ExpertBuffers& out, const Copy& copy = {}) {
  const ExpertBiases from = packed_biases(weights, at, local_expert);
  const auto inner = static_cast<size_t>(weights.config->intermediate_size),
             hidden = static_cast<size_t>(weights.config->hidden_size);
  const auto unpack = [&](std::vector<float>& to, const float* bias, size_t count) {
    to.resize(bias == nullptr ? 0 : count);
    return bias == nullptr ? Status() : copy(to.data(), bias, count * sizeof(float));
  };
  NVFP4_MOE_TRY(unpack(out.gate_bias, from.gate, inner));
  NVFP4_MOE_TRY(unpack(out.up_bias, from.up, inner));
  return unpack(out.down_bias, from.down, hidden);
}

}  // namespace nvfp4_moe::internal
