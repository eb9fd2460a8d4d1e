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

TEST(RunPlan, SmallBatchesRouteAndQuantizeInOneKernel) {
  const RunPlan one = plan_of(options(), {.tokens = 1});
  EXPECT_TRUE(one.fused_route_quantize);
  EXPECT_TRUE(one.combine.counts_hidden);
  EXPECT_EQ(one.routed.gemm1.rows, RowSource::kFusedRouting);
  EXPECT_FALSE(one.routed.gemm1.after_route);
  const RunPlan last = plan_of(options(), {.tokens = kOneCtaAssignments / 8});
  EXPECT_TRUE(last.fused_route_quantize);
  EXPECT_EQ(last.route.kernel, RouteKernel::kOneCta);
  const RunPlan next = plan_of(options(), {.tokens = kOneCtaAssignments / 8 + 1});
  EXPECT_FALSE(next.fused_route_quantize);
  EXPECT_FALSE(next.combine.counts_hidden);
  EXPECT_EQ(next.route.kernel, RouteKernel::kScatterByBits);
}

// With logits a run differs only in the kernel before route.
TEST(RunPlan, ARunOfLogitsSelectsBeforeItRoutes) {
  for (int64_t tokens : {1, 40, 4000}) {
    RunPlan given = plan_of(options(), {.tokens = tokens}),
            selects = plan_of(options(), {.tokens = tokens, .selects = true});
    EXPECT_FALSE(given.selects);
    EXPECT_TRUE(selects.selects);
    given.selects = true;
    EXPECT_EQ(given, selects);
  }
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
          const std::vector<StepPlan> steps = describe(table, config, plan);
          const auto says = [&](size_t step, const char* words) {
            return steps[step].kernel.find(words) != std::string::npos;
          };
          EXPECT_EQ(says(0, "; tiles of 128, widest first, from 129 rows on"), wide)
              << steps[0].kernel;
          EXPECT_EQ(says(2, "narrow or wide"), wide) << steps[2].kernel;
          EXPECT_EQ(says(4, "narrow or wide"), wide) << steps[4].kernel;
        }
}

TEST(RunPlan, ScansWhereBitsDoNotFit) {
  MoeOptions many = options();
  many.num_experts = 8192;
  EXPECT_EQ(plan_of(many, {.tokens = 1024}).route.kernel, RouteKernel::kScanScatter);
  const RunPlan plan = plan_of(options(), {.tokens = kMaxScatteredSlices * kRouteSlice / 8 + 1});
  EXPECT_EQ(plan.route.kernel, RouteKernel::kScanScatter);
  EXPECT_EQ(kRouteSlice % plan.route.slice_parts, 0);
}

// Each step's output is the next one's input, over batches of all sizes, formats, types and
// alignments.
TEST(RunPlan, NeighboursAgree) {
  for (const ActivationFormat format :
       {ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kFp8})
    for (const int64_t shared_size : {0, 512})
      for (const bool aligned : {false, true})
        for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32})
          for (const bool single : {false, true})
            for (int64_t tokens = 1; tokens <= 16384; tokens = tokens * 3 / 2 + 1) {
              MoeOptions layer = options();
              layer.activation_format = format;
              layer.shared_intermediate_size = shared_size;
              const RunPlan plan = plan_of(layer, {tokens, dtype, aligned, single});
              SCOPED_TRACE(std::to_string(tokens) + " tokens, " + to_string(format));
              const GemmConfig& gemm = kConfigs[static_cast<size_t>(plan.routed.gemm1.config)];
              EXPECT_EQ(plan.route.tile_n, gemm.tile_n);
              EXPECT_EQ(plan.routed.gemm2.config, plan.routed.gemm1.config);
              EXPECT_EQ(plan.hidden.into_rows, plan.routed.gemm1.rows == RowSource::kInRows);
              EXPECT_EQ(plan.combine.counts_hidden, plan.fused_route_quantize);
              if (plan.combine.reads_flags) {
                EXPECT_TRUE(plan.routed.gemm1.flags_nonfinite);
              }
              if (plan.hidden.into_rows) {
                EXPECT_EQ(shared_size, 0) << "the shared expert reads hidden once a token";
              }
              if (single) {
                EXPECT_FALSE(plan.fused_route_quantize || plan.hidden.into_rows ||
                             plan.combine.counts_intermediate);
                EXPECT_NE(plan.routed.requantize.kernel, QuantizeKernel::kNone);
              }
              const bool vec8 = plan.hidden.kernel == QuantizeKernel::kVec8Cta ||
                                plan.hidden.kernel == QuantizeKernel::kVec8Warp;
              if (vec8) {
                EXPECT_TRUE(aligned && dtype == DType::kBf16 && quantizes(format));
              }
              const bool by_gemm2 = plan.routed.requantize.kernel == QuantizeKernel::kByGemm2;
              EXPECT_EQ(plan.routed.gemm2.waits_for_quantize, quantizes(format) && !by_gemm2);
              if (by_gemm2) {
                EXPECT_TRUE(format == ActivationFormat::kFp8 && gemm.fused_requantize && !single);
              }
              EXPECT_EQ(plan.operand, Operand::kBf16);
              EXPECT_EQ(plan.e4m3_weights, format == ActivationFormat::kFp8);
              for (const QuantizePlan* quantize :
                   {&plan.hidden, &plan.routed.requantize, &plan.shared.requantize}) {
                if (quantize->kernel == QuantizeKernel::kNone ||
                    quantize->kernel == QuantizeKernel::kByGemm2)
                  continue;
                EXPECT_GT(quantize->ctas, 0);
                EXPECT_GT(quantize->threads, 0);
                EXPECT_LE(quantize->threads, kVec8Threads);
                EXPECT_EQ(quantize->threads % 32, 0);
              }
            }
}

TEST(RunPlan, NamesTheFormatOfRows) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
    MoeOptions layer = options();
    layer.activation_format = format;
    const auto steps = describe(kTable, *MoeConfig::make(layer), plan_of(layer, {.tokens = 400}));
    const std::string name = to_string(format);
    EXPECT_EQ(steps[1].kernel.rfind(name + "_vec8_cta", 0), 0u) << steps[1].kernel;
    EXPECT_EQ(steps[3].kernel.rfind(name + "_vec8_warp", 0), 0u) << steps[3].kernel;  // 3200 rows
  }
}

// gemm2 requantizes under fp8 only, if the configuration can, as long as the rows that each CTA
// then reads whole are short and few, and if no step is called by itself.
TEST(RunPlan, Gemm2RequantizesSmallBatches) {
  const auto requantize_of = [](MoeOptions layer, RunFacts facts, int forced = -1) {
    return plan_of(layer, facts, forced).routed.requantize.kernel;
  };
  MoeOptions layer = options();
  layer.activation_format = ActivationFormat::kFp8;
  for (const int64_t tokens : {1, 2, 16, 100}) {
    EXPECT_EQ(requantize_of(layer, {.tokens = tokens}), QuantizeKernel::kByGemm2) << tokens;
    EXPECT_NE(requantize_of(layer, {.tokens = tokens, .single_steps = true}),
              QuantizeKernel::kByGemm2)
        << tokens;
    EXPECT_NE(requantize_of(layer, {.tokens = tokens}, 1), QuantizeKernel::kByGemm2) << tokens;
  }
  const RunPlan plan = plan_of(layer, {.tokens = 1});
  EXPECT_FALSE(plan.routed.gemm2.waits_for_quantize);
  EXPECT_EQ(describe(kTable, *MoeConfig::make(layer), plan)[3].kernel, "fp8_by_gemm2");
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16}) {
    layer.activation_format = format;
    EXPECT_NE(requantize_of(layer, {.tokens = 1}), QuantizeKernel::kByGemm2);
  }
  layer.activation_format = ActivationFormat::kFp8;
  layer.intermediate_size = 14336;
  EXPECT_EQ(requantize_of(layer, {.tokens = 1}), QuantizeKernel::kVec8Cta);
  // The shared expert separately: its rows are the tokens.
  layer.shared_intermediate_size = 2048;
  EXPECT_EQ(plan_of(layer, {.tokens = 4}).shared.requantize.kernel, QuantizeKernel::kByGemm2);
  EXPECT_EQ(plan_of(layer, {.tokens = 5}).shared.requantize.kernel, QuantizeKernel::kVec8Cta);
}

// The configuration is chosen in one place. Another one changes route's tiles, the way rows are
// loaded, the output of quantize, and combine's counts with it.
TEST(RunPlan, AForcedConfigurationMovesEveryStep) {
  MoeOptions layer = options();
  layer.activation_format = ActivationFormat::kBf16;
  const RunFacts facts{.tokens = 512};
  const RunPlan narrow = plan_of(layer, facts, 0), wide = plan_of(layer, facts, 1);
  EXPECT_EQ(narrow.route.tile_n, 8);
  EXPECT_EQ(wide.route.tile_n, 64);
  EXPECT_FALSE(narrow.route.widest_first);
  EXPECT_TRUE(wide.route.widest_first);
  EXPECT_FALSE(narrow.hidden.into_rows);
  EXPECT_TRUE(wide.hidden.into_rows);
  EXPECT_EQ(narrow.routed.gemm1.rows, RowSource::kGathered);
  EXPECT_EQ(wide.routed.gemm1.rows, RowSource::kInRows);
  EXPECT_FALSE(narrow.combine.reads_flags);
  EXPECT_TRUE(wide.combine.reads_flags);
  EXPECT_LT(narrow.partial_bytes, wide.partial_bytes);
  EXPECT_NE(describe(kTable, *MoeConfig::make(layer), narrow),
            describe(kTable, *MoeConfig::make(layer), wide));
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

// Hidden is multiplied by its router weight after route and before quantize: the plan has no kernel
// that would read it earlier or from the batch. The shared expert's hidden is quantized in the same
// step.
TEST(RunPlan, OnInputMakesItsRowsBeforehand) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const int64_t shared_size : {0, 512})
      for (const bool aligned : {false, true})
        for (int64_t tokens = 1; tokens <= 16384; tokens = tokens * 3 / 2 + 1) {
          SCOPED_TRACE(std::to_string(tokens) + " tokens, " + to_string(format));
          MoeOptions layer = options();
          layer.top_k = 1;
          layer.activation_format = format;
          layer.shared_intermediate_size = shared_size;
          const RunFacts facts{tokens, DType::kBf16, aligned, false};
          const RunPlan before = plan_of(layer, facts);
          EXPECT_FALSE(before.weighs_hidden);
          EXPECT_EQ(before.shared_hidden, QuantizePlan{});
          layer.router_weight = RouterWeight::kOnInput;
          const RunPlan plan = plan_of(layer, facts);
          EXPECT_TRUE(plan.weighs_hidden);
          EXPECT_FALSE(plan.fused_route_quantize || plan.combine.counts_hidden ||
                       plan.routed.gemm1.early_hidden);
          EXPECT_NE(plan.routed.gemm1.rows, RowSource::kFusedRouting);
          EXPECT_TRUE(plan.routed.gemm1.after_route);
          EXPECT_EQ(plan.hidden.into_rows, plan.routed.gemm1.rows == RowSource::kInRows);
          EXPECT_EQ(plan.shared_hidden.kernel != QuantizeKernel::kNone, shared_size > 0);
          EXPECT_FALSE(plan.shared_hidden.into_rows);
          const bool vec8 = plan.hidden.kernel == QuantizeKernel::kVec8Cta ||
                            plan.hidden.kernel == QuantizeKernel::kVec8Warp;
          EXPECT_EQ(vec8, format == ActivationFormat::kNvfp4) << "the weighed array is aligned";
          EXPECT_EQ(plan.routed.gemm2, before.routed.gemm2);
          const std::vector<StepPlan> steps = describe(kTable, *MoeConfig::make(layer), plan);
          EXPECT_NE(steps[1].kernel.find("hidden times the router weight"), std::string::npos);
        }
  MoeOptions layer = options();
  layer.top_k = 1;
  layer.router_weight = RouterWeight::kOnInput;
  EXPECT_FALSE(plan_of(layer, {.tokens = 0}).weighs_hidden);
}

TEST(RunPlan, PartialsGrowWithTokens) {
  int64_t before = 0;
  for (int64_t tokens = 1; tokens <= 4096; ++tokens) {
    const int64_t bytes = plan_of(options(), {.tokens = tokens}).partial_bytes;
    EXPECT_GE(bytes, before) << tokens;
    before = bytes;
  }
}

TEST(RunPlan, OfNoTokensEnqueuesRouteAlone) {
  const RunPlan plan = plan_of(options(), {.tokens = 0});
  EXPECT_FALSE(plan.fused_route_quantize);
  EXPECT_EQ(plan.hidden.kernel, QuantizeKernel::kNone);
  EXPECT_EQ(plan.routed.requantize.kernel, QuantizeKernel::kNone);
  EXPECT_EQ(plan.combine.counting_ctas, 0);
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
