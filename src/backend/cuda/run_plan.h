// RunPlan: what one run on a GPU does, decided once, before anything is enqueued, from the layer,
// the batch's size, types and alignment, and what is known of the device.
//
// It holds plain values and no pointers: it can be compared and printed, and making one takes no
// device and no memory. Each step gets it and decides nothing that stands here: what one step
// leaves for another (rows already in expert order, nonfinite rows already reported, counters not
// yet added up) is a field that both read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/operand.h"

namespace nvfp4_moe::internal {
namespace cuda {

// A compiled GEMM configuration, as the steps around the GEMMs see it.
struct GemmConfig {
  const char* name;
  int tile_n;       // rows of activations in a tile, at most
  bool even_tiles;  // an expert's tiles share its rows evenly; else all but the last one are full
  bool tma_rows;  // activations come by TMA and lie in the order of the rows; else each CTA gathers
                  // its tokens
  bool fused_routing;     // each CTA can route a small batch for itself
  int64_t partial_bytes;  // of the accumulators of one split-K partial
  // index of the configuration that its kernels hold besides, for a rank with many rows
  int wide = -1;
  // gemm2's CTAs can turn the rows of a small batch to E4M3 as they load them
  bool fused_requantize = false;
};

// An architecture's GEMMs.
struct GemmTable {
  const char* backend;  // its registry name
  std::span<const GemmConfig> configs;
  // Indices into configs for the routed experts and for the shared expert of a run. The host knows
  // how many rows an expert has on average, not how many each has.
  int (*routed)(const MoeConfig& config, const ExpertRange& range, int64_t tokens);
  int (*shared)(int64_t tokens);
  bool (*splits_k)(const MoeConfig& config,
                   int64_t k);  // whether a GEMM of so long a K is cut along it
  int64_t max_ctas;             // of one GEMM; 0: one a tile
  Operands operands = {};       // what they take of quantized activations
};

enum class RouteKernel : uint8_t {
  kOneCta,         // counts, scans and places by one CTA
  kScatterByBits,  // counts by slices of assignments, then every CTA scans for itself and scatters
                   // its slice
  kScanScatter,    // counts by slices, scans in one CTA, scatters: any number of slices and experts
};
struct RoutePlan {
  RouteKernel kernel = RouteKernel::kOneCta;
  int threads = 0;
  int64_t shared_bytes = 0;  // of the CTA that does the most
  // of 128 assignments, of the experts' bit masks; 0: one CTA sorts by slices
  int32_t segments = 0;
  int64_t slice = 0;  // assignments of one slice
  int32_t slices = 0;
  int32_t slice_parts = 0;  // warps that scatter a slice, under kScanScatter
  int tile_n = 0;           // what the routed GEMMs want of their tiles
  bool even_tiles = false;
  // what they want of them if the rank has more rows than max_narrow_rows; 0: the same
  int wide_tile_n = 0;
  int64_t max_narrow_rows = 0;
  bool widest_first = false;     // tiles are listed in the order of their rows, the most first
  int32_t cleared_counters = 0;  // the GEMMs' arrival counters, which route sets to 0
  bool sorts_tiles() const { return widest_first || wide_tile_n > 0; }
  bool operator==(const RoutePlan&) const = default;
};

enum class QuantizeKernel : uint8_t {
  kNone,
  kRound,           // to bf16
  kAnyType,         // to NVFP4 or E4M3, a CTA a row, any dtype and rule
  kVec8Cta,         // the same of bf16 under a power of two, by vec8, a CTA a row
  kVec8Warp,        // the same, a warp a row
  kCountNonfinite,  // the intermediate under bf16, which is multiplied as it is
  kByGemm2,         // the intermediate to E4M3, by gemm2 as it loads it: no kernel
};
struct QuantizePlan {
  QuantizeKernel kernel = QuantizeKernel::kNone;
  int threads = 0;  // of a CTA
  int64_t ctas = 0;
  // hidden is written to every row of its token, in expert order, and not once a token
  bool into_rows = false;
  bool operator==(const QuantizePlan&) const = default;
};

enum class RowSource : uint8_t {
  kGathered,       // each CTA gathers the tokens of its rows
  kFusedRouting,   // the same of a small batch, which each CTA routes for itself while route does
  kGatheredFirst,  // by TMA, after a kernel of the GEMM's own has put the tokens in the order of
                   // the rows
  kInRows,         // by TMA: they lie in the order of the rows already
};
struct GemmPlan {
  int config = 0;  // index into the architecture's table
  int tile_n = 0;
  // the configuration that the kernel takes instead if route lists wide tiles; -1: none
  int wide = -1;
  int ctas = 0;  // of a persistent kernel
  bool split_k = false;
  RowSource rows = RowSource::kGathered;
  // route has ended before this kernel begins, and not just before it waits
  bool after_route = false;
  // under kFusedRouting: rows are the batch's own, there before this kernel begins
  bool early_hidden = false;
  bool waits_for_quantize = false;  // the kernel before it quantizes this GEMM's rows
  bool flags_nonfinite = false;     // it says of each row whether it has NaN or Inf
  bool operator==(const GemmPlan&) const = default;
};

// The routed experts, or the shared one.
struct PartPlan {
  GemmPlan gemm1, gemm2;
  QuantizePlan requantize;
  bool operator==(const PartPlan&) const = default;
};

struct CombinePlan {
  int channels = 0;  // of a thread
  int64_t ctas_per_token = 0;
  int64_t counting_ctas = 0;   // times ctas_per_token: those that count what no step has counted
  bool counts_hidden = false;  // what quantize left beside the status
  bool counts_intermediate = false;  // nonfinite rows under bf16
  // of routed rows, which gemm1 has reported; else it reads the rows themselves
  bool reads_flags = false;
  bool operator==(const CombinePlan&) const = default;
};

// Inputs of a run's plan in addition to the layer and its device.
struct RunFacts {
  int64_t tokens = 0;
  DType hidden_dtype = DType::kBf16;
  bool hidden_aligned = true;  // to 16 bytes
  // The steps are called one by one, each from the arrays that it is declared to read: nothing is
  // fused.
  bool single_steps = false;
  bool selects = false;  // the batch has router logits and no ids

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
  bool weighs_hidden = false;
  cuda::RoutePlan route;
  cuda::QuantizePlan
      hidden;  // of the routed experts, and of the shared one where both multiply the same
  cuda::QuantizePlan shared_hidden;  // of the shared expert, if it does not
  cuda::PartPlan routed, shared;     // shared: if the layer has such an expert
  cuda::CombinePlan combine;
  cuda::Operand operand = cuda::Operand::kBf16;  // what the GEMMs multiply
  bool e4m3_weights = false;  // fp8: weights are rounded to E4M3 where they are decoded
  int64_t partial_bytes = 0;  // of one split-K partial; grows with tokens
  bool operator==(const RunPlan&) const = default;
};

namespace cuda {

// forced_config: an index that the routed GEMMs take instead of the table's; -1: none.
RunPlan make_run_plan(const GemmTable& gemms, const MoeConfig& config, const ExpertRange& range,
                      const DeviceFacts& device, const RunFacts& facts, int forced_config = -1);
// Of a dense linear: hidden's quantization and the shared part's gemm2. x: the config of the layer
// that quantizes; product: of the one that multiplies, whose shared expert is the matrix.
RunPlan make_linear_plan(const GemmTable& gemms, const MoeConfig& x, const MoeConfig& product,
                         const DeviceFacts& device, const RunFacts& facts);
// One line of text for each step.
std::vector<StepPlan> describe(const GemmTable& gemms, const MoeConfig& config,
                               const RunPlan& plan);

}  // namespace cuda
}  // namespace nvfp4_moe::internal
