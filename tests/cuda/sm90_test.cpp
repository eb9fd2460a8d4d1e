// The Hopper backend on larger layers than those of the case table.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/gemm/scheduler.h"
#include "backend/cuda/scratch.h"
#include "backend/sm90/config.h"
#include "backend/sm90/config_table.h"
#include "backend/sm90/kernels.h"
#include "cases/cases.h"
#include "judge/judge.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(Sm90Backend, TakesHopperAloneAndGoesBeforeCuda) {
  const auto config = must(MoeConfig::make(case_table().front().options));
  for (int capability : {75, 80, 89, 100, 103, 120})
    EXPECT_EQ(kSm90Backend.supports(*config, gpu_of(capability)).code(), Code::kUnsupported)
        << capability;
  EXPECT_OK(kSm90Backend.supports(*config, gpu_of(90)));
  EXPECT_EQ(kSm90Backend.supports(*config, host_facts()).code(), Code::kUnsupported);
  MoeOptions of_hosts = config->options();
  of_hosts.activation_format = ActivationFormat::kInt8Block;
  const Status declined = kSm90Backend.supports(*MoeConfig::make(of_hosts), gpu_of(90));
  EXPECT_NE(declined.message().find("int8_block"), std::string::npos) << declined.message();
}

TEST(Sm90Backend, PlansWithoutADevice) {
  for (const Case& spec : case_table()) {
    const auto config = must(MoeConfig::make(spec.options));
    if (!kSm90Backend.supports(*config, gpu_of(90)).ok()) continue;
    size_t before = 0;
    for (int64_t tokens : {1, 2, 31, 32, 33, 64, 150, 400, 500, 1000, 2500, 100000}) {
      const auto plan = must(kSm90Backend.plan(*config, spec.range, {5.0f / 2688, 12.0f / 2688},
                                               {tokens}, gpu_of(90)));
      EXPECT_GE(plan->workspace.total_bytes, before);
      before = plan->workspace.total_bytes;
    }
  }
}

// Every k-block of every output tile belongs to one work tile of one cta. Split tiles have separate
// partials, and the cta that reduces the tile finds them.
TEST(Sm90Scheduler, EveryKBlockOnce) {
  for (int n_tiles : {0, 1, 2, 7, 8, 9, 50})
    for (int m_tiles : {1, 3, 8})
      for (int k_blocks : {1, 4, 9})
        for (int ctas : {1, 5, 132})
          for (const auto& [min_saved, max_splits] : std::vector<std::pair<int, int>>{
                   {-1, 9}, {0, 9}, {3, 9}, {0, 3}, {3, 2}}) {  // -1: nothing is split
            SCOPED_TRACE(testing::Message() << n_tiles << " " << m_tiles << " " << k_blocks << " "
                                            << ctas << " " << min_saved << " " << max_splits);
            const bool split_k = min_saved >= 0;
            const cuda::Schedule schedule(
                cuda::ScheduleParams(m_tiles, k_blocks, ctas, split_k, min_saved, max_splits),
                n_tiles);
            std::vector<int> done(static_cast<size_t>(n_tiles * m_tiles * k_blocks));
            std::set<int> partials;
            int most = 0, least = 1 << 30;
            for (int cta = 0; cta < ctas; ++cta) {
              cuda::WorkTileIterator work_tiles(schedule, cta);
              int sum = 0;
              for (cuda::WorkTile work; work_tiles.next(work);) {
                sum += work.k_blocks;
                for (int k_block = 0; k_block < work.k_blocks; ++k_block)
                  ++done[static_cast<size_t>((work.tile.n_tile * m_tiles + work.tile.m_tile) *
                                                 k_blocks +
                                             work.first_k_block + k_block)];
                EXPECT_EQ(work.partial < 0, work.k_blocks == k_blocks);
                if (work.partial < 0) continue;
                EXPECT_TRUE(partials.insert(work.partial).second);
                EXPECT_LT(work.partial, 2 * ctas);
              }
              EXPECT_EQ(sum, schedule.k_blocks_of(cta));
              most = std::max(most, sum);
              least = std::min(least, sum);
            }
            for (int times : done) ASSERT_EQ(times, 1);
            EXPECT_LE(most - least, min_saved == 0 && max_splits == 9 ? 1 : k_blocks);
            const int tiles = n_tiles * m_tiles,
                      shortest = (k_blocks + max_splits - 1) / max_splits;
            const int even = std::max((tiles * k_blocks + ctas - 1) / ctas,
                                      tiles / ctas * k_blocks + (tiles % ctas != 0 ? shortest : 0));
            EXPECT_LT(most - even, min_saved > 0 ? min_saved : split_k ? 1 : k_blocks + 1);
            for (int tile = 0; tile * k_blocks < schedule.split_k_blocks; ++tile) {
              const int first = schedule.cta_of(tile * k_blocks),
                        last = schedule.cta_of(tile * k_blocks + k_blocks - 1);
              const cuda::TileSplits splits = schedule.splits_of(tile);
              EXPECT_EQ(splits.count, last - first + 1);
              EXPECT_LE(splits.count, max_splits + 1);
              for (int cta = first; cta <= last; ++cta) {
                ASSERT_LT(schedule.split_begin(cta), schedule.split_begin(cta + 1));
                EXPECT_EQ(splits.partial(cta - first), schedule.partial_of(cta, tile));
                EXPECT_EQ(partials.count(schedule.partial_of(cta, tile)), first != last ? 1u : 0u);
              }
            }
          }
}

TEST(Sm90Scheduler, DividersDivide) {
  for (int divisor : {1, 2, 3, 5, 7, 8, 96, 132, 144, 1000, 65535, 65536, 65537, 1 << 30,
                      (1 << 30) + 1, 0x7FFFFFFF}) {
    const cuda::Divider by(divisor);
    for (int64_t multiple = 0; multiple <= 0x7FFFFFFF;
         multiple += int64_t{divisor} * (1 + 0x7FFFFFFF / divisor / 3000))
      for (int64_t n = std::max<int64_t>(multiple - 2, 0);
           n <= std::min<int64_t>(multiple + 2, 0x7FFFFFFF); ++n)
        ASSERT_EQ(by(static_cast<int>(n)), n / divisor) << n << " / " << divisor;
  }
}

// The same number of tiles as with full ones, none empty or too large, and every row in a tile.
TEST(Sm90Scheduler, EvenTilesHoldEveryRow) {
  for (int tile_n : {8, 16, 32, 64, 128})
    for (int rows = 1; rows < 5000; ++rows) {
      const int step = cuda::even_tile_rows(rows, tile_n), tiles = (rows + tile_n - 1) / tile_n;
      ASSERT_TRUE(step <= tile_n && step % 8 == 0 && tiles * step >= rows &&
                  (tiles - 1) * step < rows)
          << rows << " rows in tiles of " << tile_n << ": " << step;
    }
}

class Sm90Layer : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(kSm90Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static Case spec(const Ragged& ragged, ActivationFormat format) {
    return ragged_case(ragged, format);
  }
  // The index in kGemmConfigs for the routed experts of a case.
  static size_t routed_config(const Case& spec, const MoeConfig& config) {
    const bool fp8 = spec.options.activation_format == ActivationFormat::kFp8;
    const sm90::ConfigTable& table = fp8 ? sm90::kFp8Table : sm90::kBf16Table;
    return (fp8 ? sm90::kBf16Configs : 0) +
           static_cast<size_t>(sm90::routed_config(table, config, spec.range, spec.tokens));
  }
  static void expect_every_configuration_agrees(ActivationFormat format);
};

// Shapes that select each of a format's configurations. Each has its own test, since these take
// longest on a GPU.
void Sm90Layer::expect_every_configuration_agrees(ActivationFormat format) {
  std::set<size_t> configs;
  const auto expect = [&](const Ragged& ragged, int64_t local_experts) {
    Case spec = Sm90Layer::spec(ragged, format);
    spec.range.count = local_experts;
    SCOPED_TRACE(testing::Message() << "experts " << ragged.experts << " tokens " << ragged.tokens);
    const auto data = must(make_case(spec));
    configs.insert(Sm90Layer::routed_config(spec, data->config));
    expect_agrees_with_plain(kSm90Backend, *data, 3);
  };
  for (const Ragged& ragged :
       {Ragged{4, 2, 1, Routing::kUniform}, Ragged{128, 4, 70, Routing::kUniform},
        Ragged{4, 2, 3, Routing::kUniform}, Ragged{256, 4, 150, Routing::kUniform},
        Ragged{64, 4, 24, Routing::kUniform}, Ragged{64, 4, 60, Routing::kUniform},
        Ragged{64, 4, 96, Routing::kZipf}, Ragged{4, 2, 14, Routing::kZipf},
        Ragged{4, 2, 36, Routing::kUniform}, Ragged{8, 2, 110, Routing::kUniform},
        Ragged{4, 2, 180, Routing::kZipf}, Ragged{4, 2, 220, Routing::kUniform},
        Ragged{4, 2, 700, Routing::kUniform}, Ragged{4, 2, 300, Routing::kOneExpert}})
    expect(ragged, ragged.experts);
  // Ranks that hold some of the experts; under zipf the first ones are crowded.
  for (const Ragged& ragged :
       {Ragged{64, 2, 70, Routing::kZipf}, Ragged{32, 4, 60, Routing::kZipf},
        Ragged{64, 4, 60, Routing::kZipf}, Ragged{16, 4, 200, Routing::kUniform},
        Ragged{16, 4, 64, Routing::kZipf}})
    expect(ragged, ragged.experts / 4);
  EXPECT_EQ(configs.size(),
            format == ActivationFormat::kFp8 ? sm90::kFp8Configs : sm90::kBf16Configs);
}
TEST_F(Sm90Layer, EveryConfigurationAgreesWithThePlainKernelsUnderBf16) {
  expect_every_configuration_agrees(ActivationFormat::kBf16);
}
TEST_F(Sm90Layer, EveryConfigurationAgreesWithThePlainKernelsUnderNvfp4) {
  expect_every_configuration_agrees(ActivationFormat::kNvfp4);
}
TEST_F(Sm90Layer, EveryConfigurationAgreesWithThePlainKernelsUnderFp8) {
  expect_every_configuration_agrees(ActivationFormat::kFp8);
}

// The configurations that copy rows by TMA. K is not a multiple of a box and long enough that tiles
// are split; the layers are small enough for compute-sanitizer.
using Sm90SmallLayer = Sm90Layer;
TEST_F(Sm90SmallLayer, TmaRowsAgreeWithThePlainKernels) {
  for (int64_t tokens : {56, 110})
    for (ActivationFormat format :
         {ActivationFormat::kBf16, ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
      Case spec = Sm90Layer::spec({4, 2, tokens, Routing::kUniform}, format);
      spec.options.hidden_size = 1808;
      spec.options.intermediate_size = 144;
      const auto data = must(make_case(spec));
      const sm90::GemmConfig& gemm =
          sm90::kGemmConfigs[Sm90Layer::routed_config(spec, data->config)];
      ASSERT_TRUE(gemm.tma_rows);
      const int64_t k_blocks = cuda::ceil_div(spec.options.hidden_size, cuda::kTileK);
      ASSERT_GE(k_blocks - cuda::ceil_div(k_blocks, sm90::max_splits(gemm)),
                sm90::min_saved_k_blocks(gemm));
      CaseRun plain(kCudaBackend, *data), own(kSm90Backend, *data);
      ASSERT_TRUE(plain.ok() && own.ok());
      EXPECT_EQ(beyond_limits(*data, plain.run(*data), own.run(*data)), "")
          << tokens << " " << to_string(format);
      EXPECT_EQ(own.broken_guard(), -1);
    }
}

TEST_F(Sm90Layer, ARunIsItsSteps) {
  for (int64_t tokens : {1, 3, 14, 36})
    for (IntermediateScale scale : {IntermediateScale::kDynamicToken, IntermediateScale::kFixed})
      for (DataKind values :
           {DataKind::kNormal, DataKind::kSaturating, DataKind::kTiny, DataKind::kNan})
        expect_run_is_its_steps(kSm90Backend, tokens, scale, values);
}
// Small enough for compute-sanitizer.
TEST_F(Sm90SmallLayer, ARunIsItsSteps) {
  expect_run_is_its_steps(kSm90Backend, 3, IntermediateScale::kDynamicToken, DataKind::kNan);
  // with fewer tokens a run is one kernel, whose sums are others (sm90_decode_test.cpp)
  expect_run_is_its_steps(kSm90Backend, 9, IntermediateScale::kDynamicToken, DataKind::kNan,
                          ActivationFormat::kBf16);
  expect_run_is_its_steps(kSm90Backend, 3, IntermediateScale::kDynamicToken, DataKind::kNan,
                          ActivationFormat::kFp8);
  expect_run_is_its_steps(kSm90Backend, 36, IntermediateScale::kFixed, DataKind::kNormal);
}

// With these assignments a cta of route and quantize has more threads than a token.
TEST_F(Sm90SmallLayer, ManyAssignmentsOfOneCta) {
  for (ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
    Case spec = Sm90Layer::spec({64, 4, 160, Routing::kPartlyNone}, format);
    spec.options.hidden_size = 64;
    spec.options.intermediate_size = 48;
    const auto data = must(make_case(spec));
    CaseRun own(kSm90Backend, *data), parts(kSm90Backend, *data);
    ASSERT_TRUE(own.ok() && parts.ok());
    run_against_steps(own, parts, *data);
  }
}

// With this many tokens a warp quantizes each token, and hidden is copied to the rows as it is
// quantized.
TEST_F(Sm90SmallLayer, ManyTokensAreQuantizedByWarps) {
  for (DataKind values : {DataKind::kNormal, DataKind::kNan}) {
    Case spec = Sm90Layer::spec({64, 2, 2200, Routing::kPartlyNone}, ActivationFormat::kNvfp4);
    spec.options.hidden_size = 528;
    spec.options.intermediate_size = 144;
    spec.data = values;
    const auto data = must(make_case(spec));
    ASSERT_TRUE(sm90::kGemmConfigs[Sm90Layer::routed_config(spec, data->config)].tma_rows);
    CaseRun own(kSm90Backend, *data), parts(kSm90Backend, *data), host(kCpuBackend, *data);
    ASSERT_TRUE(own.ok() && parts.ok() && host.ok());
    const std::vector<uint8_t> bytes = run_against_steps(own, parts, *data);
    EXPECT_EQ(beyond_limits(*data, host.run(*data), bytes), "");
    const RunStatus &counts = *own.buffers().status, &host_counts = *host.buffers().status;
    EXPECT_EQ(counts.nonfinite_tokens, host_counts.nonfinite_tokens);
    EXPECT_EQ(counts.nonfinite_rows, host_counts.nonfinite_rows);
    EXPECT_EQ(counts.hidden_blocks, host_counts.hidden_blocks);
    EXPECT_EQ(counts.hidden_saturated, host_counts.hidden_saturated);
    EXPECT_EQ(counts.hidden_zeroed, host_counts.hidden_zeroed);
    EXPECT_EQ(counts.intermediate_blocks, host_counts.intermediate_blocks);
  }
}

// A separate kernel copies hidden to the rows, and gemm1 reports nonfinite rows for the count.
TEST_F(Sm90SmallLayer, RowsThatAreNotFiniteAreCounted) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    Case spec = Sm90Layer::spec({64, 2, 2200, Routing::kUniform}, ActivationFormat::kBf16);
    spec.options.hidden_size = 528;
    spec.options.intermediate_size = 144;
    spec.hidden_dtype = dtype;
    auto data = must(make_case(spec));
    ASSERT_TRUE(sm90::kGemmConfigs[Sm90Layer::routed_config(spec, data->config)].tma_rows);
    const auto fill = [&](int64_t token, uint16_t bf16) {
      const size_t bytes =
          data->hidden.size() / static_cast<size_t>(spec.tokens * spec.options.hidden_size);
      for (int64_t i = 0; i < spec.options.hidden_size; ++i) {
        uint8_t* const element =
            data->hidden.data() + static_cast<size_t>(token * spec.options.hidden_size + i) * bytes;
        std::fill(element, element + bytes, uint8_t{0});
        element[bytes - 2] = static_cast<uint8_t>(bf16),
                        element[bytes - 1] = static_cast<uint8_t>(bf16 >> 8);
      }
    };
    fill(3, 0x7FC0);     // NaN
    fill(1200, 0x7F00);  // 2^127: the accumulators overflow
    CaseRun plain(kCudaBackend, *data), own(kSm90Backend, *data);
    ASSERT_TRUE(plain.ok() && own.ok());
    const auto expected = to_floats(plain.run(*data), spec.out_dtype);
    const std::vector<uint8_t> bytes = own.run(*data);
    const auto actual = to_floats(bytes, spec.out_dtype);
    EXPECT_EQ(own.buffers().status->nonfinite_tokens, 1u);
    EXPECT_EQ(own.buffers().status->nonfinite_rows, plain.buffers().status->nonfinite_rows);
    EXPECT_EQ(own.buffers().status->nonfinite_rows, 4u);
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_EQ(std::isfinite(expected[i]), std::isfinite(actual[i])) << i / 528 << " " << i % 528;
    const auto nonfinite =
        std::count_if(actual.begin(), actual.end(), [](float x) { return !std::isfinite(x); });
    const auto outputs = static_cast<uint64_t>(nonfinite);
    EXPECT_EQ(own.buffers().status->nonfinite_outputs, outputs);
    EXPECT_EQ(plain.buffers().status->nonfinite_outputs, outputs);
    EXPECT_EQ(own.broken_guard(), -1);
    ASSERT_EQ(own.run(*data), bytes) << "a repeat differs";
  }
}

// With batch_invariant a token has the same bits in every configuration.
TEST_F(Sm90Layer, BatchInvariantBitsInEveryConfiguration) {
  for (ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
    Case spec = Sm90Layer::spec({4, 2, 700, Routing::kUniform}, format);
    spec.options.batch_invariant = true;
    const auto data = must(make_case(spec));
    CaseRun all(kSm90Backend, *data);
    ASSERT_TRUE(all.ok());
    const std::vector<uint8_t> expected = all.run(*data);
    const size_t row_bytes = static_cast<size_t>(spec.options.hidden_size) * sizeof(float);
    for (int64_t tokens : {1, 14, 36, 60, 180}) {
      CaseData first = *data;
      first.spec.tokens = tokens;
      const std::vector<uint8_t> actual = all.run(first);
      ASSERT_EQ(actual.size(), static_cast<size_t>(tokens) * row_bytes);
      EXPECT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin()))
          << tokens << " " << to_string(format);
    }
  }
}

// Accumulators are 2^19 times below their values until the epilogue. Values far below 1 are
// subnormal there, and still count.
TEST_F(Sm90Layer, TinyIntermediatesCount) {
  Case spec = Sm90Layer::spec({4, 2, 14, Routing::kUniform}, ActivationFormat::kBf16);
  spec.options.router_weight = RouterWeight::kBeforeDown;
  auto data = must(make_case(spec));
  for (float& weight : data->topk_weights) weight *= 0x1p-108f;
  CaseRun plain(kCudaBackend, *data), own(kSm90Backend, *data);
  ASSERT_TRUE(plain.ok() && own.ok());
  const auto expected = to_floats(plain.run(*data), spec.out_dtype);
  const auto actual = to_floats(own.run(*data), spec.out_dtype);
  double error = 0, norm = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(0x1p100 * (double{expected[i]} - actual[i]), 2);
    norm += std::pow(0x1p100 * expected[i], 2);
    largest = std::max(largest, std::fabs(double{expected[i]}));
  }
  EXPECT_GT(largest, 0x1p-120);
  EXPECT_LT(largest, 0x1p-100);  // so that many accumulators are below 2^-126
  EXPECT_LE(std::sqrt(error / norm), layer_limits(data->config, spec.tokens).relative_l2);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
