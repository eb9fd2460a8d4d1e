// RunPlan: everything that one run on a GPU does, decided once before anything is enqueued, from
// the layer, the batch's size, types and alignment, and the device's facts.
//
// It holds plain values and no pointers: it can be compared and printed, and making one needs no
// device and no memory. Steps receive it and do not repeat its decisions. What one step leaves to
// another (rows already in expert order, nonfinite rows already reported, counters not yet added
// up) is a field that both read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/operand.h"

namespace nvfp4_moe::internal {
namespace cuda {

// A compiled GEMM configuration, as far as the steps around the GEMMs need it.
struct GemmConfig {
  const char* name;
  int tile_n;  // maximum rows of activations in a tile
  // an expert's tiles divide its rows evenly; otherwise all except the last are full
  bool even_tiles;
  // TMA copies activations that are stored in row order; otherwise each CTA gathers its tokens
  bool tma_rows;
  bool fused_routing;     // each CTA can route a small batch itself
  int64_t partial_bytes;  // size of one split-K partial
  // index of the second configuration in its kernels, for a rank with many rows
  int wide = -1;
  // gemm2's CTAs can convert the rows of a small batch to E4M3 as they load them
  bool fused_requantize = false;
};

// Kernels with two configurations are compiled only for the functions of swiglu.
constexpr bool has_wide_kernels(Activation activation) {
  return has_gate(activation) && !is_gelu_or_situ(activation);
}

// A run whose steps are one kernel, except for select_experts.
struct OneLaunchPlan {
  int ctas = 0;               // all resident at once; 0: the run has a launch per step
  int gate_up_warps_k = 1;    // under fp8, that share 16 weight rows of gate/up along K
  int down_warps_k = 1;       // the same of an expert's 16 output channels
  int64_t partial_bytes = 0;  // partials in shared memory
  int64_t shared_bytes = 0;
  bool operator==(const OneLaunchPlan&) const = default;
};
struct RunFacts;

// An architecture's GEMMs.
struct GemmTable {
  const char* backend;  // its registry name
  std::span<const GemmConfig> configs;
  // Indices into configs for the routed experts and for the shared expert of a run. The host knows
  // the average number of rows per expert, not the number of each.
  int (*routed)(const MoeConfig& config, const ExpertRange& range, int64_t tokens);
  int (*shared)(int64_t tokens);
  bool (*splits_k)(const MoeConfig& config,
                   int64_t k);  // whether a GEMM with this K is split along it
  int64_t max_ctas;             // of one GEMM; 0: one per tile
  Operands operands = {};       // form of quantized activations
  // When a run is one kernel; null: never.
  OneLaunchPlan (*one_launch)(const MoeConfig& config, const ExpertRange& range,
                              const DeviceFacts& device, const RunFacts& facts) = nullptr;
};

enum class RouteKernel : uint8_t {
  kOneCta,  // one CTA counts, scans and scatters
  // counts by slices of assignments, then every CTA scans and scatters its own slice
  kScatterByBits,
  kScanScatter,  // counts by slices, scans in one CTA, scatters: any number of slices and experts
};
struct RoutePlan {
  RouteKernel kernel = RouteKernel::kOneCta;
  int threads = 0;
  int64_t shared_bytes = 0;  // of the CTA that needs the most
  // of 128 assignments each, in the experts' bit masks; 0: one CTA sorts by slices
  int32_t segments = 0;
  int64_t slice = 0;  // assignments per slice
  int32_t slices = 0;
  int32_t slice_parts = 0;  // warps that scatter a slice, under kScanScatter
  int tile_n = 0;           // requirements of the routed GEMMs on their tiles
  bool even_tiles = false;
  // their tile width if the rank has more rows than max_narrow_rows; 0: the same
  int wide_tile_n = 0;
  int64_t max_narrow_rows = 0;
  bool widest_first = false;     // tiles are sorted by their rows, the most first
  int32_t cleared_counters = 0;  // the GEMMs' arrival counters, which route sets to 0
  bool sorts_tiles() const { return widest_first || wide_tile_n > 0; }
  bool operator==(const RoutePlan&) const = default;
};

enum class QuantizeKernel : uint8_t {
  kNone,
  kRound,           // to bf16
  kAnyType,         // to NVFP4 or E4M3, one CTA per row, any dtype and rule
  kVec8Cta,         // the same for bf16 and power-of-two scales, by vec8, one CTA per row
  kVec8Warp,        // the same with one warp per row
  kCountNonfinite,  // the intermediate under bf16, which is multiplied as it is
  kByGemm2,         // the intermediate to E4M3, by gemm2 as it loads it: no kernel
};
struct QuantizePlan {
  QuantizeKernel kernel = QuantizeKernel::kNone;
  int threads = 0;  // per CTA
  int64_t ctas = 0;
  // hidden is written to every row of its token, in expert order, not once per token
  bool into_rows = false;
  bool operator==(const QuantizePlan&) const = default;
};

enum class RowSource : uint8_t {
  kGathered,       // each CTA gathers the tokens of its rows
  kFusedRouting,   // the same for a small batch, which each CTA routes itself while route runs
  kGatheredFirst,  // by TMA, after a separate kernel has copied the tokens into row order
  kInRows,         // by TMA: already in row order
};
struct GemmPlan {
  int config = 0;  // index into the architecture's table
  int tile_n = 0;
  // the configuration that the kernel uses instead if route lists wide tiles; -1: none
  int wide = -1;
  int ctas = 0;  // of a persistent kernel
  bool split_k = false;
  RowSource rows = RowSource::kGathered;
  // route has ended before this kernel starts, not only after its wait
  bool after_route = false;
  // under kFusedRouting: rows are the batch's own, ready before this kernel starts
  bool early_hidden = false;
  bool waits_for_quantize = false;  // the preceding kernel quantizes this GEMM's rows
  bool flags_nonfinite = false;     // it reports for each row whether it has NaN or Inf
  bool operator==(const GemmPlan&) const = default;
};

// The routed experts, or the shared one.
struct PartPlan {
  GemmPlan gemm1, gemm2;
  QuantizePlan requantize;
  bool operator==(const PartPlan&) const = default;
};

struct CombinePlan {
  int channels = 0;  // per thread
  int64_t ctas_per_token = 0;
  int64_t counting_ctas = 0;   // times ctas_per_token: those that add up counts of no earlier step
  bool counts_hidden = false;  // the counts per token that quantize left
  bool counts_intermediate = false;  // nonfinite rows under bf16
  // for routed rows, whose flags gemm1 has set; otherwise it reads the rows themselves
  bool reads_flags = false;
  bool operator==(const CombinePlan&) const = default;
};

// Inputs of a run's plan in addition to the layer and its device.
struct RunFacts {
  int64_t tokens = 0;
  DType hidden_dtype = DType::kBf16;
  bool hidden_aligned = true;  // to 16 bytes
  // The steps are called one by one, each with the arrays that it is declared to read: nothing is
  // fused.
  bool single_steps = false;
  bool selects = false;  // the batch has router logits instead of ids

  static RunFacts of(const Batch& batch, bool single_steps = false) {
    return {.tokens = batch.tokens,
            .hidden_dtype = batch.hidden_dtype,
            .hidden_aligned = reinterpret_cast<uintptr_t>(batch.hidden) % 16 == 0,
            .single_steps = single_steps,
            .selects = batch.selection != nullptr};
  }
};

}  // namespace cuda

struct RunPlan {
  int64_t tokens = 0;
  bool selects = false;               // a kernel before route selects the experts
  bool fused_route_quantize = false;  // one kernel routes and quantizes hidden
  // a kernel before quantize multiplies hidden by the router weights, for `hidden`
  bool scale_hidden = false;
  cuda::RoutePlan route;
  cuda::QuantizePlan
      hidden;  // for the routed experts; also for the shared one if both multiply the same
  cuda::QuantizePlan shared_hidden;  // for the shared expert, if it does not
  cuda::PartPlan routed, shared;     // shared: if the layer has such an expert
  cuda::CombinePlan combine;
  cuda::OneLaunchPlan one_launch;  // if it has ctas, the plans of the steps are not used
  cuda::Operand operand = cuda::Operand::kBf16;  // the form in which GEMMs read activations
  bool e4m3_weights = false;  // fp8: weights are rounded to E4M3 when they are dequantized
  int64_t partial_bytes = 0;  // of one split-K partial; grows with tokens
  bool operator==(const RunPlan&) const = default;
};

namespace cuda {

// limits: gemm_config and one_launch. A forced configuration has a launch per step.
RunPlan make_run_plan(const GemmTable& gemms, const MoeConfig& config, const ExpertRange& range,
                      const DeviceFacts& device, const RunFacts& facts, const Limits& limits = {});
// The plan of a dense linear: hidden's quantization and the shared part's gemm2. x: the config of
// the layer that quantizes. product: that of the layer that multiplies, whose shared expert is the
// matrix.
RunPlan make_linear_plan(const GemmTable& gemms, const MoeConfig& x, const MoeConfig& product,
                         const DeviceFacts& device, const RunFacts& facts);
// A description of each step.
std::vector<StepPlan> describe(const GemmTable& gemms, const MoeConfig& config,
                               const RunPlan& plan);

}  // namespace cuda
}  // namespace nvfp4_moe::internal
