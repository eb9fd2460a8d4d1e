// The plan of a run, without a device: its choices, that all steps use it, and that it is cheap to
// make.
#include "backend/cuda/run_plan.h"

#include <array>
#include <chrono>
#include <cmath>
#include <string>

#include "backend/cuda/steps/sizes.h"
#include "cases/cases.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cuda {
namespace {

using testing::HasSubstr;

// A table of two configurations: a narrow one that gathers, and a wide one that loads rows by TMA.
constexpr std::array<GemmConfig, 2> kConfigs = {{
    {"narrow", 8, true, false, true, 4096, -1, true},
    {"wide", 64, true, true, false, 65536},
}};
int routed(const MoeConfig& config, const ExpertRange&, int64_t tokens) {
  return tokens * config->top_k <= 8 * config->num_experts ? 0 : 1;
}
int shared(int64_t tokens) { return tokens <= 8 ? 0 : 1; }
bool splits_k(const MoeConfig& config, int64_t k) { return !config->batch_invariant && k >= 512; }
constexpr GemmTable kTable = {"table", kConfigs, routed, shared, splits_k, 144};

DeviceFacts hopper() {
  DeviceFacts facts;
  facts.kind = DeviceKind::kCuda;
  facts.name = "a GPU";
  facts.compute_units = 132;
  facts.compute_capability = 90;
  facts.cta_shared_bytes = 227 * 1024;
  return facts;
}

MoeOptions options() {
  MoeOptions options;
  set_sizes(options, 128, 8, 2048, 768);
  return options;
}

RunPlan plan_of(const MoeOptions& options, RunFacts facts, int forced = -1) {
  const MoeConfig config = *MoeConfig::make(options);
  Limits limits;
  limits.gemm_config = forced;
  return make_run_plan(kTable, config, {0, options.num_experts}, hopper(), facts, limits);
}

bool is_vec8(const QuantizePlan& plan) {
  return plan.kernel == QuantizeKernel::kVec8Cta || plan.kernel == QuantizeKernel::kVec8Warp;
}

TEST(RunPlan, SmallBatchesRouteAndQuantizeInOneKernel) {
  const int64_t last = kOneCtaAssignments / 8;
  const struct {
    int64_t tokens;
    bool fused;
    RouteKernel route;
    RowSource rows;
  } cases[] = {{1, true, RouteKernel::kOneCta, RowSource::kFusedRouting},
               {last, true, RouteKernel::kOneCta, RowSource::kGatheredFirst},
               {last + 1, false, RouteKernel::kScatterByBits, RowSource::kInRows},
               {kMaxScatteredSlices * kRouteSlice / 8 + 1, false, RouteKernel::kScanScatter,
                RowSource::kInRows}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.tokens);
    const RunPlan plan = plan_of(options(), {.tokens = one.tokens});
    EXPECT_EQ(plan.fused_route_quantize, one.fused);
    EXPECT_EQ(plan.combine.counts_hidden, one.fused);
    EXPECT_EQ(plan.routed.gemm1.after_route, one.rows != RowSource::kFusedRouting);
    EXPECT_EQ(plan.route.kernel, one.route);
    EXPECT_EQ(plan.routed.gemm1.rows, one.rows);
    if (one.route == RouteKernel::kScanScatter) {
      EXPECT_EQ(kRouteSlice % plan.route.slice_parts, 0);
    }
    // With logits a run differs only in the kernel before route.
    RunPlan selects = plan_of(options(), {.tokens = one.tokens, .selects = true});
    EXPECT_TRUE(selects.selects && !plan.selects);
    selects.selects = false;
    EXPECT_EQ(plan, selects);
  }
  MoeOptions many = options();
  many.num_experts = 8192;  // their bits do not fit
  EXPECT_EQ(plan_of(many, {.tokens = 1024}).route.kernel, RouteKernel::kScanScatter);

  const RunPlan none = plan_of(options(), {.tokens = 0});
  EXPECT_FALSE(none.fused_route_quantize);
  EXPECT_EQ(none.hidden.kernel, QuantizeKernel::kNone);
  EXPECT_EQ(none.routed.requantize.kernel, QuantizeKernel::kNone);
  EXPECT_EQ(none.combine.counting_ctas, 0);
}

// A narrow configuration with kernels that include a wide one, for a rank that gets many rows.
TEST(RunPlan, KernelsHoldAWideConfigurationBesides) {
  static constexpr std::array<GemmConfig, 2> kBoth = {{
      {"narrow", 8, true, false, true, 4096, 1},
      {"wide", 128, true, true, false, 65536},
  }};
  const GemmTable table = {
      "table", kBoth,    [](const MoeConfig&, const ExpertRange&, int64_t) { return 0; },
      shared,  splits_k, 144};
  MoeOptions layer = options();
  layer.num_experts = 4096;
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const bool single : {false, true})
      for (const int64_t experts : {int64_t{16}, kMaxSortedExperts + 1})
        for (const int64_t tokens : {4, 5, 40, 4000}) {
          layer.activation_format = format;
          const MoeConfig config = *MoeConfig::make(layer);
          const RunPlan plan = make_run_plan(table, config, {0, experts}, hopper(),
                                             {.tokens = tokens, .single_steps = single});
          const bool wide = tokens * layer.top_k > kSmallBatch && experts <= kMaxSortedExperts;
          EXPECT_EQ(plan.routed.gemm1.config, 0);
          EXPECT_EQ(plan.routed.gemm1.wide, wide ? 1 : -1) << tokens;
          EXPECT_EQ(plan.routed.gemm2.wide, plan.routed.gemm1.wide);
          EXPECT_EQ(plan.route.tile_n, 8);
          EXPECT_EQ(plan.route.wide_tile_n, wide ? 128 : 0);
          EXPECT_EQ(plan.route.max_narrow_rows, wide ? experts * 8 : 0);
          EXPECT_EQ(plan.route.sorts_tiles(), wide);
          EXPECT_EQ(plan.partial_bytes, wide ? 65536 : 4096);
          EXPECT_FALSE(plan.combine.reads_flags);
          if (!wide) continue;
          const std::vector<StepPlan> steps = describe(table, config, plan);
          EXPECT_THAT(steps[0].kernel, HasSubstr("; tiles of 128, widest first, from 129 rows on"));
          EXPECT_THAT(steps[2].kernel, HasSubstr("narrow or wide"));
        }
}

// Each step's output is the next one's input.
void expect_neighbours_agree(const MoeOptions& layer, const RunFacts& facts) {
  SCOPED_TRACE(testing::Message() << facts.tokens << " tokens, "
                                  << to_string(layer.activation_format));
  const ActivationFormat format = layer.activation_format;
  const RunPlan plan = plan_of(layer, facts);
  const GemmPlan& gemm1 = plan.routed.gemm1;
  const GemmConfig& gemm = kConfigs[static_cast<size_t>(gemm1.config)];
  EXPECT_EQ(plan.route.tile_n, gemm.tile_n);
  EXPECT_EQ(plan.routed.gemm2.config, gemm1.config);
  EXPECT_EQ(plan.hidden.into_rows, gemm1.rows == RowSource::kInRows);
  EXPECT_EQ(plan.combine.counts_hidden, plan.fused_route_quantize);
  if (plan.hidden.into_rows) {
    EXPECT_EQ(layer.shared_intermediate_size, 0) << "the shared expert reads hidden once a token";
  }
  if (facts.single_steps) {
    EXPECT_FALSE(plan.fused_route_quantize || plan.hidden.into_rows ||
                 plan.combine.counts_intermediate);
    EXPECT_NE(plan.routed.requantize.kernel, QuantizeKernel::kNone);
  }
  if (is_vec8(plan.hidden)) {
    EXPECT_TRUE(facts.hidden_aligned && facts.hidden_dtype == DType::kBf16 && quantizes(format));
  }
  const bool by_gemm2 = plan.routed.requantize.kernel == QuantizeKernel::kByGemm2;
  EXPECT_EQ(plan.routed.gemm2.waits_for_quantize, quantizes(format) && !by_gemm2);
  if (by_gemm2) {
    EXPECT_TRUE(format == ActivationFormat::kFp8 && gemm.fused_requantize && !facts.single_steps);
  }
  EXPECT_EQ(plan.operand, Operand::kBf16);
  EXPECT_EQ(plan.e4m3_weights, format == ActivationFormat::kFp8);
  for (const QuantizePlan* quantize :
       {&plan.hidden, &plan.routed.requantize, &plan.shared.requantize}) {
    if (quantize->kernel == QuantizeKernel::kNone || quantize->kernel == QuantizeKernel::kByGemm2)
      continue;
    EXPECT_GT(quantize->ctas, 0);
    EXPECT_TRUE(quantize->threads > 0 && quantize->threads <= kVec8Threads &&
                quantize->threads % 32 == 0)
        << quantize->threads;
  }
}
// Batches of all sizes, formats, types and alignments.
TEST(RunPlan, NeighboursAgree) {
  MoeOptions layer = options();
  for (const ActivationFormat format :
       {ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kFp8})
    for (const int64_t shared_size : {0, 512})
      for (const bool aligned : {false, true})
        for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32})
          for (const bool single : {false, true})
            for (int64_t tokens = 1; tokens <= 16384; tokens = tokens * 3 / 2 + 1) {
              layer.activation_format = format;
              layer.shared_intermediate_size = shared_size;
              expect_neighbours_agree(layer, {tokens, dtype, aligned, single});
            }
}

// A linear has no route that its GEMM could follow; its replacement runs just before.
TEST(RunPlan, ALinearIsOneGemmAfterQuantize) {
  const MoeConfig config = *MoeConfig::make(options());
  for (const int64_t tokens : {1, 40}) {
    const RunPlan plan = make_linear_plan(kTable, config, config, hopper(), {.tokens = tokens});
    EXPECT_EQ(plan.shared.gemm2.config, shared(tokens));
    EXPECT_FALSE(plan.shared.gemm2.after_route);
    EXPECT_TRUE(plan.shared.gemm2.waits_for_quantize);
    EXPECT_TRUE(is_vec8(plan.hidden));
    EXPECT_EQ(plan.hidden.ctas, tokens);
    EXPECT_EQ(plan.route.cleared_counters, 144);
  }
}

// gemm2 requantizes under fp8 only, if the configuration can, as long as the rows that each CTA
// then reads whole are short and few, and if no step is called by itself.
TEST(RunPlan, Gemm2RequantizesSmallBatches) {
  MoeOptions layer = options();
  const auto by_gemm2 = [&](RunFacts facts, int forced = -1) {
    return plan_of(layer, facts, forced).routed.requantize.kernel == QuantizeKernel::kByGemm2;
  };
  for (const ActivationFormat format :
       {ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kFp8})
    for (const int64_t tokens : {1, 2, 16, 100}) {
      layer.activation_format = format;
      EXPECT_EQ(by_gemm2({.tokens = tokens}), format == ActivationFormat::kFp8) << tokens;
      EXPECT_FALSE(by_gemm2({.tokens = tokens, .single_steps = true})) << tokens;
      EXPECT_FALSE(by_gemm2({.tokens = tokens}, 1)) << tokens;
    }
  layer.intermediate_size = 14336;
  EXPECT_FALSE(by_gemm2({.tokens = 1}));
  // The shared expert separately: its rows are the tokens.
  layer.shared_intermediate_size = 2048;
  EXPECT_EQ(plan_of(layer, {.tokens = 4}).shared.requantize.kernel, QuantizeKernel::kByGemm2);
  EXPECT_EQ(plan_of(layer, {.tokens = 5}).shared.requantize.kernel, QuantizeKernel::kVec8Cta);
}

// gemm1 reports nonfinite rows to combine if its rows come by TMA and nothing quantizes them. A
// small batch's combine reads the rows themselves.
TEST(RunPlan, CombineReadsFlagsOfManyTokens) {
  MoeOptions layer = options();
  layer.activation_format = ActivationFormat::kBf16;
  for (const int64_t tokens : {kSmallCombineTokens, kSmallCombineTokens + 1}) {
    EXPECT_FALSE(plan_of(layer, {.tokens = tokens}, 0).combine.reads_flags);
    const RunPlan plan = plan_of(layer, {.tokens = tokens}, 1);
    EXPECT_TRUE(plan.routed.gemm1.flags_nonfinite);
    EXPECT_EQ(plan.combine.reads_flags, tokens > kSmallCombineTokens) << tokens;
  }
}

TEST(RunPlan, BatchInvarianceNeverSplitsK) {
  MoeOptions layer = options();
  EXPECT_TRUE(plan_of(layer, {.tokens = 4}).routed.gemm1.split_k);
  layer.batch_invariant = true;
  const RunPlan plan = plan_of(layer, {.tokens = 4});
  EXPECT_FALSE(plan.routed.gemm1.split_k);
  EXPECT_FALSE(plan.routed.gemm2.split_k);
  EXPECT_EQ(plan.partial_bytes, 0);
}

TEST(RunPlan, PartialsGrowWithTokens) {
  int64_t before = 0;
  for (int64_t tokens = 1; tokens <= 4096; ++tokens) {
    const int64_t bytes = plan_of(options(), {.tokens = tokens}).partial_bytes;
    EXPECT_GE(bytes, before) << tokens;
    before = bytes;
  }
}

// Making a plan is arithmetic: compared with the launches of a run, which take microseconds, it
// must be negligible. The best of many repeats is taken, so that another process's time slice does
// not count.
TEST(RunPlan, IsCheapToMake) {
  const MoeConfig config = *MoeConfig::make(options());
  const DeviceFacts device = hopper();
  double best_us = 1e9;
  int64_t sum = 0;
  for (int round = 0; round < 50; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i)
      sum += make_run_plan(kTable, config, {0, 128}, device, {.tokens = 1 + i % 4})
                 .combine.ctas_per_token;
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    best_us = std::min(best_us, took.count() / 100);
  }
  EXPECT_GT(sum, 0);
  RecordProperty("plan_ns", std::to_string(best_us * 1000));
  EXPECT_LT(best_us, 1.0);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cuda
