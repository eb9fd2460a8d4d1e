// The decisions of a run, in the order of its steps.
#include "backend/cuda/run_plan.h"

#include <algorithm>
#include <string>

#include "backend/cuda/steps/sizes.h"

namespace nvfp4_moe::internal::cuda {
namespace {

// Inputs of every decision below.
struct PlanInputs {
  const GemmTable& gemms;
  const MoeConfig& config;
  const ExpertRange& range;
  const DeviceFacts& device;
  const RunFacts& facts;

  bool quantizes() const { return cuda::quantizes(config->activation_format); }
  int64_t tokens() const { return facts.tokens; }
  int64_t assignments() const { return facts.tokens * config->top_k; }
  bool has_shared() const { return config->shared_intermediate_size > 0; }
  bool on_input() const { return config->router_weight == RouterWeight::kOnInput; }
};

// ---- route

// How one CTA routes: with bit masks if they fit into shared memory; otherwise with one warp per
// slice, as many as have room for their counters.
void plan_one_cta(const PlanInputs& q, RoutePlan& route) {
  const int64_t experts = q.range.count, assignments = q.assignments();
  const int64_t bit_bytes = route_bits_bytes(assignments, experts, route.sorts_tiles());
  if (bit_bytes <= kSharedBytesOfAll ||
      bit_bytes <= q.device.cta_shared_bytes - kRouteStaticBytes) {
    route.segments = static_cast<int32_t>(ceil_div(assignments, kRouteSegment));
    route.slices = 1;  // one count of bad ids
    route.threads = assignments <= 2 * kRouteSmallThreads ? kRouteSmallThreads : kRouteLargeThreads;
    route.shared_bytes = bit_bytes;
    return;
  }
  const int64_t fitting = kRouteCounterBytes / (experts * static_cast<int64_t>(sizeof(int32_t))),
                useful = ceil_div(assignments, 32);
  const int64_t warps = std::max<int64_t>(1, std::min<int64_t>({kRouteMaxWarps, fitting, useful}));
  route.slice = ceil_div(ceil_div(assignments, warps), 32) * 32;
  route.slices = static_cast<int32_t>(route.slice == 0 ? 0 : ceil_div(assignments, route.slice));
  route.threads = static_cast<int>(warps * 32);
  route.shared_bytes = warps * experts * static_cast<int64_t>(sizeof(int32_t));
  if (route.sorts_tiles())
    route.shared_bytes += (experts + 1) * kTileKeyBytes;  // aligned to 8 bytes
}

// wide: for a rank with many rows, or null.
RoutePlan plan_route(const PlanInputs& q, const GemmConfig& gemm, const GemmConfig* wide) {
  const int64_t experts = q.range.count;
  RoutePlan route;
  route.tile_n = gemm.tile_n;
  route.even_tiles = gemm.even_tiles;
  route.widest_first =
      gemm.even_tiles && gemm.tile_n >= kMinSortedTileN && experts <= kMaxSortedExperts;
  if (wide != nullptr) {
    route.wide_tile_n = wide->tile_n;
    route.max_narrow_rows = max_narrow_rows(experts, gemm.tile_n);
  }
  route.cleared_counters = static_cast<int32_t>(q.gemms.max_ctas);
  if (q.assignments() <= kOneCtaAssignments) {
    plan_one_cta(q, route);
    return route;
  }
  route.slice = kRouteSlice;
  route.slices = static_cast<int32_t>(ceil_div(q.assignments(), kRouteSlice));
  route.threads = kRouteSlice;
  route.shared_bytes = scatter_bits_bytes(experts);
  if (route.slices <= kMaxScatteredSlices &&
      route.shared_bytes <= q.device.cta_shared_bytes - kRouteStaticBytes) {
    route.kernel = RouteKernel::kScatterByBits;
    return route;
  }
  route.kernel = RouteKernel::kScanScatter;
  const int64_t counter_bytes = experts * static_cast<int64_t>(sizeof(int32_t));
  route.slice_parts = 8;  // a power of two, so that it divides a slice
  while (route.slice_parts > 1 && route.slice_parts * counter_bytes > kRouteCounterBytes)
    route.slice_parts /= 2;
  route.shared_bytes = route.slice_parts * counter_bytes;
  return route;
}

// ---- quantize

// aligned: the input of quantize, to 16 bytes.
QuantizePlan plan_hidden(const PlanInputs& q, bool aligned, bool fused, bool tma_rows) {
  const int64_t k = q.config->hidden_size, tokens = q.tokens();
  const bool vec8 = q.quantizes() && q.facts.hidden_dtype == DType::kBf16 && aligned &&
                    q.config->activation_scale != ActivationScale::kVllmOrder;
  QuantizePlan plan{.ctas = tokens};
  if (tokens == 0) return plan;
  // The shared expert reads hidden once per token, so rows are not enough if it reads the same
  // hidden.
  plan.into_rows = tma_rows && !fused && !q.facts.single_steps &&
                   (!q.has_shared() || q.on_input()) && (!q.quantizes() || vec8);
  if (!q.quantizes()) {
    plan.kernel = QuantizeKernel::kRound;
    plan.threads = fused ? kRowThreads : plan.into_rows ? kIntoRowsThreads : row_threads(k);
  } else if (!vec8) {
    plan.kernel = QuantizeKernel::kAnyType;
    plan.threads = fused ? kRowThreads : row_threads(k);
  } else if (!fused && tokens >= kManyRows) {
    plan.kernel = QuantizeKernel::kVec8Warp;
    plan.threads = kWarpRowThreads;
    plan.ctas = ceil_div(tokens, kWarpRowThreads / 32);
  } else {
    plan.kernel = QuantizeKernel::kVec8Cta;
    plan.threads = fused ? std::max(kRowThreads, vec8_threads(k, tokens)) : vec8_threads(k, tokens);
  }
  return plan;
}

// rows: upper bound. expected: if every expert had the same number. If CTAs take several rows,
// there are as many as run at once.
QuantizePlan plan_requantize(const PlanInputs& q, int64_t k, int64_t rows, int64_t expected) {
  QuantizePlan plan;
  if (rows == 0 || (!q.quantizes() && !q.facts.single_steps))
    return plan;  // combine counts nonfinite rows
  const auto resident = [&](int64_t ctas, int threads) {
    return std::min<int64_t>(ctas, int64_t{q.device.compute_units} * (kVec8Threads / threads));
  };
  plan.ctas = rows;
  plan.threads = row_threads(k);
  if (!q.quantizes()) {
    plan.kernel = QuantizeKernel::kCountNonfinite;
  } else if (q.config->intermediate_scale == IntermediateScale::kVllmOrder) {
    plan.kernel = QuantizeKernel::kAnyType;
  } else if (expected >= kManyRows) {
    plan.kernel = QuantizeKernel::kVec8Warp;
    plan.threads = kWarpRowThreads;
    plan.ctas = resident(ceil_div(rows, kWarpRowThreads / 32), kWarpRowThreads);
  } else {
    plan.kernel = QuantizeKernel::kVec8Cta;
    plan.threads = vec8_threads(k, rows);
    plan.ctas = resident(rows, plan.threads);
  }
  return plan;
}

// ---- the GEMMs

GemmPlan plan_gemm(const PlanInputs& q, int index, int64_t k) {
  GemmPlan gemm;
  gemm.config = index;
  gemm.tile_n = q.gemms.configs[static_cast<size_t>(index)].tile_n;
  gemm.ctas = static_cast<int>(std::min<int64_t>(q.device.compute_units, q.gemms.max_ctas));
  gemm.split_k = q.gemms.splits_k(q.config, k);
  return gemm;
}

// Whether gemm2 quantizes its rows as it loads them. Each CTA reads them completely before it
// multiplies, in several batches of reads. If there are few batches, a separate kernel takes
// longer. tile_rows: the approximate number for an expert with rows.
bool gemm2_requantizes(const PlanInputs& q, int index, int wide, int64_t k, double tile_rows) {
  return q.config->activation_format == ActivationFormat::kFp8 && !q.facts.single_steps &&
         q.tokens() > 0 && wide < 0 &&
         q.gemms.configs[static_cast<size_t>(index)].fused_requantize &&
         tile_rows * static_cast<double>(k) <= kMaxRequantizedTile;
}

GemmPlan plan_gemm2(const PlanInputs& q, int index, int64_t k) {
  GemmPlan gemm = plan_gemm(q, index, k);
  if (q.gemms.configs[static_cast<size_t>(index)].tma_rows) gemm.rows = RowSource::kInRows;
  gemm.after_route = true;
  gemm.waits_for_quantize = q.quantizes();
  return gemm;
}

// Plans the part's requantize and gemm2. rows, expected, tile_rows: as above.
void plan_second_half(const PlanInputs& q, PartPlan& part, int index, int wide, int64_t k,
                      int64_t rows, int64_t expected, double tile_rows) {
  part.gemm2 = plan_gemm2(q, index, k);
  part.gemm2.wide = wide;
  if (gemm2_requantizes(q, index, wide, k, tile_rows)) {
    part.requantize.kernel = QuantizeKernel::kByGemm2;
    part.gemm2.waits_for_quantize = false;
  } else {
    part.requantize = plan_requantize(q, k, rows, expected);
  }
}

GemmPlan plan_routed_gemm1(const PlanInputs& q, int index, const RunPlan& run) {
  const GemmConfig& config = q.gemms.configs[static_cast<size_t>(index)];
  GemmPlan gemm = plan_gemm(q, index, q.config->hidden_size);
  if (config.tma_rows) {
    gemm.rows = run.hidden.into_rows ? RowSource::kInRows : RowSource::kGatheredFirst;
  } else if (run.fused_route_quantize && config.fused_routing && q.assignments() <= kSmallBatch) {
    gemm.rows = RowSource::kFusedRouting;
    gemm.early_hidden =
        !q.quantizes() && q.facts.hidden_dtype == DType::kBf16 && q.facts.hidden_aligned;
  }
  // Another kernel runs between route and this one and has waited for route: gather, or quantize.
  gemm.after_route = config.tma_rows || (!q.facts.single_steps && !run.fused_route_quantize);
  gemm.flags_nonfinite = config.tma_rows && !q.quantizes();
  return gemm;
}

PartPlan plan_shared(const PlanInputs& q) {
  const int index = q.gemms.shared(q.tokens());
  const int64_t inner = q.config->shared_intermediate_size;
  PartPlan part;
  part.gemm1 = plan_gemm(q, index, q.config->hidden_size);
  if (q.gemms.configs[static_cast<size_t>(index)].tma_rows) part.gemm1.rows = RowSource::kInRows;
  part.gemm1.after_route = !q.facts.single_steps;  // the routed experts' GEMMs precede it
  plan_second_half(q, part, index, -1, inner, q.tokens(), q.tokens(),
                   static_cast<double>(q.tokens()));
  return part;
}

// ---- combine

CombinePlan plan_combine(const PlanInputs& q, const RunPlan& run) {
  const int64_t tokens = q.tokens();
  CombinePlan combine;
  const bool small_batch = tokens <= kSmallCombineTokens;
  combine.channels = small_batch ? kSmallCombineChannels : kLargeCombineChannels;
  combine.ctas_per_token =
      tokens >= kLargeCombineTokens
          ? 1
          : ceil_div(q.config->hidden_size, int64_t{kCombineThreads} * combine.channels);
  if (q.facts.single_steps || tokens == 0) return combine;
  combine.counts_hidden = run.fused_route_quantize;
  combine.counts_intermediate = !q.quantizes();
  combine.reads_flags = run.routed.gemm1.flags_nonfinite && !small_batch;
  int64_t rows = combine.counts_hidden ? 1 : 0;
  if (combine.counts_intermediate) {
    rows += combine.reads_flags ? ceil_div(q.assignments(), 32) : q.assignments();
    if (q.has_shared()) rows += tokens;
  }
  combine.counting_ctas =
      ceil_div(rows, combine.ctas_per_token * (small_batch ? 1 : kCombineThreads / 32));
  return combine;
}

// The largest of the configurations up to `last`, so that it grows with tokens; 0 if nothing is
// split along K.
int64_t partial_bytes(const PlanInputs& q, int last) {
  const int64_t longest_k = std::max(
      {q.config->hidden_size, q.config->intermediate_size, q.config->shared_intermediate_size});
  if (!q.gemms.splits_k(q.config, longest_k)) return 0;
  int64_t largest = 0;
  for (int i = 0; i <= last; ++i)
    largest = std::max(largest, q.gemms.configs[static_cast<size_t>(i)].partial_bytes);
  return largest;
}

}  // namespace

RunPlan make_run_plan(const GemmTable& gemms, const MoeConfig& config, const ExpertRange& range,
                      const DeviceFacts& device, const RunFacts& facts, const Limits& limits) {
  const PlanInputs q{gemms, config, range, device, facts};
  const int forced = limits.gemm_config,
            index = forced >= 0 ? forced : gemms.routed(config, range, facts.tokens);
  const GemmConfig& gemm = gemms.configs[static_cast<size_t>(index)];
  // A small batch that one warp routes lists one kind of tiles, and wide tiles are
  // sorted.
  const bool may_be_wide = q.assignments() > kSmallBatch && range.count <= kMaxSortedExperts &&
                           has_wide_kernels(config->activation);
  const int wide = may_be_wide ? gemm.wide : -1;
  RunPlan run;
  run.tokens = facts.tokens;
  run.operand = gemms.operands.of(config->activation_format);
  run.e4m3_weights = config->activation_format == ActivationFormat::kFp8;
  run.scale_hidden = q.on_input() && facts.tokens > 0;
  // Weighted hidden is written after route, which determines the tokens that have a row.
  run.fused_route_quantize = !facts.single_steps && facts.tokens > 0 &&
                             q.assignments() <= kOneCtaAssignments && !run.scale_hidden;
  run.route = plan_route(q, gemm, wide < 0 ? nullptr : &gemms.configs[static_cast<size_t>(wide)]);
  // The weighted array is in the workspace, which is aligned.
  run.hidden = plan_hidden(q, facts.hidden_aligned || run.scale_hidden, run.fused_route_quantize,
                           gemm.tma_rows);
  if (run.scale_hidden && q.has_shared())
    run.shared_hidden = plan_hidden(q, facts.hidden_aligned, false, false);
  run.routed.gemm1 = plan_routed_gemm1(q, index, run);
  run.selects = facts.selects;
  run.routed.gemm1.wide = wide;
  const double rows_per_expert =
      static_cast<double>(q.assignments()) / static_cast<double>(config->num_experts);
  plan_second_half(q, run.routed, index, wide, config->intermediate_size, q.assignments(),
                   q.assignments() * range.count / config->num_experts, 1 + rows_per_expert);
  int last = std::max(index, wide);
  if (q.has_shared()) {
    run.shared = plan_shared(q);
    last = std::max(last, run.shared.gemm1.config);
  }
  run.combine = plan_combine(q, run);
  if (gemms.one_launch != nullptr && limits.one_launch && forced < 0)
    run.one_launch = gemms.one_launch(config, range, device, facts);
  run.partial_bytes = partial_bytes(q, last);
  return run;
}

RunPlan make_linear_plan(const GemmTable& gemms, const MoeConfig& x, const MoeConfig& product,
                         const DeviceFacts& device, const RunFacts& facts) {
  const ExpertRange none{0, 0};
  RunPlan run;
  run.tokens = facts.tokens;
  run.operand = gemms.operands.of(x->activation_format);
  run.e4m3_weights = x->activation_format == ActivationFormat::kFp8;
  const PlanInputs x_inputs{gemms, x, none, device, facts};
  run.hidden = plan_hidden(x_inputs, facts.hidden_aligned, false, false);
  const PlanInputs q{gemms, product, none, device, facts};
  const int index = gemms.shared(facts.tokens);
  run.shared.gemm2 = plan_gemm2(q, index, product->shared_intermediate_size);
  // a linear has no route: its replacement runs just before this kernel
  run.shared.gemm2.after_route = false;
  run.route.cleared_counters = static_cast<int32_t>(gemms.max_ctas);
  run.partial_bytes = partial_bytes(q, index);
  return run;
}

namespace {

const char* name_of(RouteKernel kernel) {
  switch (kernel) {
    case RouteKernel::kOneCta: return "one_cta";
    case RouteKernel::kScatterByBits: return "scatter_by_bits";
    case RouteKernel::kScanScatter: break;
  }
  return "scan_scatter";
}
std::string name_of(QuantizeKernel kernel, ActivationFormat format) {
  switch (kernel) {
    case QuantizeKernel::kNone: return "none";
    case QuantizeKernel::kRound: return "round_to_bf16";
    case QuantizeKernel::kAnyType: return std::string(to_string(format)) + "_any_type";
    case QuantizeKernel::kVec8Cta: return std::string(to_string(format)) + "_vec8_cta";
    case QuantizeKernel::kVec8Warp: return std::string(to_string(format)) + "_vec8_warp";
    case QuantizeKernel::kCountNonfinite: return "count_nonfinite";
    case QuantizeKernel::kByGemm2: break;
  }
  return std::string(to_string(format)) + "_by_gemm2";
}
const char* name_of(RowSource rows) {
  switch (rows) {
    case RowSource::kGathered: return "rows gathered by each CTA";
    case RowSource::kFusedRouting: return "routed and gathered by each CTA";
    case RowSource::kGatheredFirst: return "rows by TMA after a gather";
    case RowSource::kInRows: break;
  }
  return "rows by TMA";
}
std::string text_of(const QuantizePlan& plan, ActivationFormat format) {
  std::string text = name_of(plan.kernel, format);
  if (plan.kernel == QuantizeKernel::kNone || plan.kernel == QuantizeKernel::kByGemm2) return text;
  text += ", " + std::to_string(plan.ctas) + " x " + std::to_string(plan.threads) + " threads";
  return plan.into_rows ? text + ", into expert order" : text;
}
std::string text_of(const GemmTable& gemms, const GemmPlan& plan, bool gemm1) {
  std::string text = gemms.configs[static_cast<size_t>(plan.config)].name;
  if (plan.wide >= 0)
    text += std::string(" or ") + gemms.configs[static_cast<size_t>(plan.wide)].name;
  if (gemm1 || plan.rows == RowSource::kInRows) text += std::string(", ") + name_of(plan.rows);
  if (plan.split_k) text += ", split-K";
  return text;
}

}  // namespace

std::vector<StepPlan> describe(const GemmTable& gemms, const MoeConfig& config,
                               const RunPlan& plan) {
  const ActivationFormat format = config->activation_format;
  if (plan.one_launch.ctas > 0)
    return {{"layer", "one launch of " + std::to_string(plan.one_launch.ctas) + " CTAs" +
                          (plan.selects ? ", after select_experts" : "")}};
  std::string route =
      std::string(name_of(plan.route.kernel)) + ", tiles of " + std::to_string(plan.route.tile_n);
  if (plan.route.even_tiles) route += ", rows shared evenly";
  if (plan.route.widest_first) route += ", widest first";
  if (plan.route.wide_tile_n > 0)
    route += "; tiles of " + std::to_string(plan.route.wide_tile_n) + ", widest first, from " +
             std::to_string(plan.route.max_narrow_rows + 1) + " rows on";
  if (plan.fused_route_quantize) route += ", fused with quantize";
  if (plan.selects) route += ", after select_experts";
  std::vector<StepPlan> steps{{"route", route}};
  std::string quantize = text_of(plan.hidden, format);
  if (plan.scale_hidden) quantize = "hidden times the router weight, then " + quantize;
  if (plan.shared_hidden.kernel != QuantizeKernel::kNone)
    quantize += "; hidden of the shared expert: " + text_of(plan.shared_hidden, format);
  steps.push_back({"quantize", quantize});
  const auto add_part = [&](const PartPlan& part, const std::string& suffix) {
    steps.push_back({"gemm1_swiglu" + suffix, text_of(gemms, part.gemm1, true)});
    steps.push_back({"requantize" + suffix, text_of(part.requantize, format)});
    steps.push_back({"gemm2" + suffix, text_of(gemms, part.gemm2, false)});
  };
  add_part(plan.routed, "");
  if (config->shared_intermediate_size > 0) add_part(plan.shared, "_shared");
  std::string combine =
      "fp32_fma_in_order, " + std::to_string(plan.combine.ctas_per_token) + " CTAs a token";
  if (plan.combine.counting_ctas > 0) combine += ", counts what no step has";
  steps.push_back({"combine", combine});
  return steps;
}

}  // namespace nvfp4_moe::internal::cuda
