// Backend: the contract that every backend fulfils. One const table per architecture, no
// inheritance.
//
// pack -> plan -> run. pack may allocate and fail. plan is a pure function. run only computes, or
// enqueues on a device: it never allocates, waits, reads files or takes locks. Everything that can
// fail is checked before run.
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

// The local index of the shared expert (if MoeOptions::shared_intermediate_size > 0).
inline constexpr int64_t kSharedExpert = -1;

// Tensor scales of one expert. They multiply the fp32 accumulators (as alpha) and are never folded
// into block scales.
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

// The codes of a block whose scale is 0, if they are not all 0. They contribute nothing to a
// product. A layout may store zeros instead and keep the codes here, for unpack.
struct ZeroScaleCodes {
  int projection = 0;  // 0 gate, 1 up, 2 down
  int64_t block = 0;   // row * (cols / 16) + block of the row
  std::array<uint8_t, 8> codes{};
};

// A layer's local experts in one backend's layout. moe/ guarantees that every expert is packed
// before the first run.
// A stream and device memory that a caller lends to unpack_expert. Null: unpack_expert uses the
// calling thread's stream, and allocates memory.
struct LentStaging {
  void* stream = nullptr;
  const Buffer* memory = nullptr;
};

struct PackedWeights {
  MoeConfig config;
  ExpertRange range;
  LayerScales scales;
  std::vector<TensorScales>
      tensor_scales;  // (range.count), plus one at the end for the shared expert
  Buffer bytes;       // (Backend::packed_bytes) in the backend's layout
  int device = 0;     // index of the device that holds bytes; 0 for host memory
  // Same shape as tensor_scales; empty if the layout keeps all codes itself.
  std::vector<std::vector<ZeroScaleCodes>> zero_scale_codes = {};
  // State that pack_expert keeps between experts. The caller frees it after the last one.
  Buffer staging = {};
  // Same shape as tensor_scales, written by pack_expert; empty unless activation_format is fp8.
  std::vector<Fp8ExpertWeights> fp8_weights = {};

  const TensorScales& tensor_scales_of(int64_t local_expert) const {
    return tensor_scales[index_of(local_expert)];
  }
  TensorScales& tensor_scales_of(int64_t local_expert) {
    return tensor_scales[index_of(local_expert)];
  }
  // Default values if there are none; only fp8 reads them.
  Fp8ExpertWeights fp8_weights_of(int64_t local_expert) const {
    return fp8_weights.empty() ? Fp8ExpertWeights{} : fp8_weights[index_of(local_expert)];
  }
  size_t index_of(int64_t local_expert) const {
    return static_cast<size_t>(local_expert == kSharedExpert ? range.count : local_expert);
  }
};

// Arrays of one matrix in the checkpoint's layout, contiguous. unpack fills them.
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

// An expert's buffers as a packer's source, which borrows them. The shared expert's are allowed
// too.
inline ExpertSource source_of(const MoeConfig& config, const ExpertBuffers& of) {
  const int64_t hidden = config->hidden_size,
                inner = static_cast<int64_t>(of.down.codes.size()) * 2 / hidden;
  const auto view = [](const Nvfp4Buffers& matrix, float scale, int64_t rows, int64_t cols) {
    return Nvfp4View::contiguous(matrix.codes.data(), matrix.block_scales.data(), scale, rows,
                                 cols);
  };
  const auto bias = [](const std::vector<float>& values) {
    return values.empty() ? nullptr : values.data();
  };
  ExpertSource source{view(of.gate, of.scales.gate, gate_rows(config->activation, inner), hidden),
                      view(of.up, of.scales.up, inner, hidden),
                      view(of.down, of.scales.down, hidden, inner)};
  source.biases = {bias(of.gate_bias), bias(of.up_bias), bias(of.down_bias)};
  return source;
}

struct RunContext {
  Executor* executor = nullptr;  // host backends: never null
  void* stream = nullptr;        // device backends
  // device backends: the run writes its report here; null: into the workspace
  RunStatus* status = nullptr;
};

// A dense NVFP4 linear y = x W^T: W (rows, cols) = (out_features, in_features).
struct LinearWeights {
  int64_t rows = 0;
  int64_t cols = 0;
  float tensor_scale = 1.0f;
  ActivationFormat activation_format = ActivationFormat::kNvfp4;
  ActivationScale activation_scale = ActivationScale::kDynamicToken;
  // static: a power of two; vllm_order: the checkpoint's number; otherwise unused
  float input_scale = 0.0f;
  Fp8Weights fp8;     // written by linear_pack under fp8
  Buffer bytes;       // (Backend::linear_bytes)
  int device = 0;     // index of the device that holds bytes; 0 for host memory
  DeviceFacts facts;  // of that device
};
struct LinearBatch {
  int64_t tokens = 0;
  const void* x = nullptr;  // (tokens, cols)
  DType x_dtype = DType::kBf16;
  void* out = nullptr;  // (tokens, rows)
  DType out_dtype = DType::kBf16;
};

// Copies between host memory and a device's, for loading, reading a run's report, and tests. A copy
// returns when it is complete; earlier work in the stream has finished by then.
struct DeviceMemory {
  Status (*to_device)(int device, void* to, const void* from, size_t size_bytes, void* stream);
  Status (*to_host)(int device, void* to, const void* from, size_t size_bytes, void* stream);
  Status (*synchronize)(int device);  // waits for all work of the device
  // An id, unique to the graph that the stream is being captured into; 0 if it is not capturing.
  Result<uint64_t> (*capture_id)(void* stream);
  Result<Buffer> (*allocate)(size_t size_bytes, int device, const char* purpose);
  // Copies (rows, row_bytes) on the device: source rows are stride_bytes apart, destination rows
  // are contiguous. Only enqueues.
  Status (*gather_rows)(int device, void* to, const void* from, int64_t rows, int64_t row_bytes,
                        int64_t stride_bytes, void* stream);
};

// Device timers and peak rates, for `bench`.
struct DeviceMeasures {
  // Captures the work that `enqueue` puts into its stream as one graph, and replays it for
  // `seconds`: at least five times, at most most_replays times. Returns the microseconds of each
  // replay, by the device's clock.
  Result<std::vector<double>> (*time_graph)(int device,
                                            const std::function<Status(void* stream)>& enqueue,
                                            double seconds, int64_t most_replays);
  // Bytes per second that all multiprocessors together read from memory, from a buffer larger than
  // every cache.
  Result<double> (*read_rate)(int device);
  // FLOP per second of the tensor cores in bf16, measured with the instruction of the backend's
  // GEMMs.
  Result<double> (*product_rate)(int device);
  const char* product_instruction;
};

// When a backend's kernels are compared with those of `cuda` on a device (moe/self_check.h).
enum class SelfCheck : uint8_t {
  kNever,
  kOnRequest,  // doctor --self-check, NVFP4_MOE_SELF_CHECK=always
  kBeforeUse,  // also before "auto" takes the backend, which no GPU of its kind has run yet
};

struct Backend {
  const char* name;
  int priority;  // the highest that supports a layer is chosen; no two are equal

  // Ok, or kUnsupported with a reason that a user can act on.
  Status (*supports)(const MoeConfig& config, const DeviceFacts& device);

  size_t (*packed_bytes)(const MoeConfig& config, const ExpertRange& range);
  // Memory for packed weights and workspaces, aligned to 256 bytes, on the device of that index
  // (host backends: 0). purpose ("packed weights of layer 12") appears in the message of
  // kOutOfMemory, next to the requested and the free size.
  Result<Buffer> (*allocate)(size_t size_bytes, int device, const char* purpose);
  // Writes one expert's codes and block scales to weights.bytes and its tensor scales to
  // weights.tensor_scales. When it returns the source may be freed. moe/ has already checked host
  // arrays. Only backends with `memory` take a source on the device: they check it here and return
  // kBadInput before they write anything.
  Status (*pack_expert)(PackedWeights& weights, int64_t local_expert, const ExpertSource& source);
  // Restores the source bit for bit, including tensor scales. Host backends do not use `lent`.
  Status (*unpack_expert)(const PackedWeights& weights, int64_t local_expert,
                          const LentStaging& lent, ExpertBuffers& out);

  Result<Plan> (*plan)(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales,
                       const Limits& limits, const DeviceFacts& device);
  // Preconditions, checked by moe/: batch.tokens <= limits, pointers and dtypes valid. workspace:
  // workspace_bytes(batch.tokens) long, aligned to Arena::kAlignment. batch.selection: always null
  // without `memory`; backends with `memory` compute it first.
  Status (*run)(const PackedWeights& weights, const Plan& plan, const Batch& batch,
                std::byte* workspace, const RunContext& context);
  // Workspace size of a run with that many tokens. It never shrinks as tokens grow, and is cheap
  // enough to call before every run.
  size_t (*workspace_bytes)(const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                            int64_t tokens);

  // Describes a run of that many tokens, one entry per step. null: the plan is the same for all
  // runs.
  std::vector<StepPlan> (*describe_run)(const MoeConfig& config, const ExpertRange& range,
                                        const Plan& plan, int64_t tokens) = nullptr;
  // The GEMM configurations under that format, which Limits::gemm_config chooses from: rows of
  // activations in a full tile of each, the wide one if its kernel has two. null: there is one.
  std::vector<int> (*gemm_tile_rows)(ActivationFormat format) = nullptr;

  // A dense linear. All four are null if the backend has none.
  size_t (*linear_bytes)(int64_t rows, int64_t cols);
  Status (*linear_pack)(LinearWeights& weights, const Nvfp4View& source);
  size_t (*linear_workspace_bytes)(const LinearWeights& weights,
                                   int64_t tokens);  // grows with tokens; cheap
  Status (*linear_run)(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                       const RunContext& context);

  const LayerSteps*
      steps;  // the same layer one step at a time; null if the backend does not have these steps

  // null: weights, workspaces and batches are in host memory.
  const DeviceMemory* memory = nullptr;

  // The variant that the backend selected on this host, for `explain`; null if it has only one.
  std::string (*selection)() = nullptr;

  SelfCheck self_check = SelfCheck::kNever;

  // A short warning to users; null: no warning.
  const char* caveat = nullptr;
  // A warning about accumulation under fp8; null: it is the same as for other formats.
  const char* fp8_caveat = nullptr;

  // null: timed with the host's clock and threads.
  const DeviceMeasures* measures = nullptr;

  // null: only the host's functions (core/) exist.
  const DeviceFormats* formats = nullptr;
  const DeviceRouter* router = nullptr;
};

// The backends of this build. Each folder defines its own; moe/registry.cpp lists them.
extern const Backend kReferenceBackend;
extern const Backend kCpuBackend;
// The CUDA backends exist only in builds with NVFP4_MOE_WITH_CUDA.
extern const Backend kCudaBackend;
extern const Backend kSm90Backend;
extern const Backend kSm100Backend;
extern const Backend kSm120Backend;
// The cpu backend with its instruction set forced, named "cpu:NAME", best first. A host supports
// only some of them.
std::span<const Backend> cpu_instruction_sets();

// The CUDA device of that index; kUnsupported with the driver's message if there is none. Only in
// builds with CUDA.
Result<DeviceFacts> cuda_device_facts(int index);

// ---- biases of routed experts
//
// A backend stores them after its matrices in the same memory, so code that caches or maps packed
// weights includes them. Layout: (E, 2 I + H) fp32, each expert's gate, up and down in turn;
// without a gate (E, I + H); without expert_biases no bytes. The copy function is a parameter
// because the memory may be on a device.

inline size_t biases_of_one(const MoeConfig& config) {
  return static_cast<size_t>(gate_rows(config->activation, config->intermediate_size) +
                             config->intermediate_size + config->hidden_size);
}
inline size_t packed_biases_bytes(const MoeConfig& config, const ExpertRange& range) {
  return config->expert_biases
             ? static_cast<size_t>(range.count) * biases_of_one(config) * sizeof(float)
             : 0;
}

// at: size of the data before the biases, a multiple of 16. Empty for the shared expert.
inline ExpertBiases packed_biases(const PackedWeights& weights, size_t at, int64_t local_expert) {
  const MoeConfig& config = weights.config;
  if (!config->expert_biases || local_expert == kSharedExpert) return {};
  const auto* first = reinterpret_cast<const float*>(weights.bytes.data() + at) +
                      static_cast<size_t>(local_expert) * biases_of_one(config);
  const float* up = first + gate_rows(config->activation, config->intermediate_size);
  return {up == first ? nullptr : first, up, up + config->intermediate_size};
}

// Copies biases into and out of packed bytes: copy(to, from, bytes) returns a Status. This one is
// for host memory.
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
                         size_t count) {  // the memory is ours and writable
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
