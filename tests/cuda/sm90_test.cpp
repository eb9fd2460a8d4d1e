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

constexpr ActivationFormat kFormats[] = {ActivationFormat::kBf16, ActivationFormat::kNvfp4,
                                         ActivationFormat::kFp8};

class Sm90Layer : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(kSm90Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  // A small layer of ragged sizes whose K is `hidden`.
  static Case small(const Ragged& ragged, ActivationFormat format, int64_t hidden,
                    int64_t intermediate = 144) {
    Case spec = ragged_case(ragged, format);
    spec.options.hidden_size = hidden;
    spec.options.intermediate_size = intermediate;
    return spec;
  }
  // The index in kGemmConfigs for the routed experts of a case.
  static size_t routed_config(const Case& spec, const MoeConfig& config) {
    const bool fp8 = spec.options.activation_format == ActivationFormat::kFp8;
    const sm90::ConfigTable& table = fp8 ? sm90::kFp8Table : sm90::kBf16Table;
    return (fp8 ? sm90::kBf16Configs : 0) +
           static_cast<size_t>(sm90::routed_config(table, config, spec.range, spec.tokens));
  }
};

// The configurations that copy rows by TMA. K is not a multiple of a box and long enough that tiles
// are split; the layers are small enough for compute-sanitizer.
using Sm90SmallLayer = Sm90Layer;
TEST_F(Sm90SmallLayer, TmaRowsAgreeWithThePlainKernels) {
  for (int64_t tokens : {56, 110})
    for (const ActivationFormat format : kFormats) {
      SCOPED_TRACE(testing::Message() << tokens << " " << to_string(format));
      const Case spec = small({4, 2, tokens, Routing::kUniform}, format, 1808);
      const auto data = must(make_case(spec));
      const sm90::GemmConfig& gemm =
          sm90::kGemmConfigs[Sm90Layer::routed_config(spec, data->config)];
      ASSERT_TRUE(gemm.tma_rows);
      const int64_t k_blocks = cuda::ceil_div(spec.options.hidden_size, cuda::kTileK);
      ASSERT_GE(k_blocks - cuda::ceil_div(k_blocks, sm90::max_splits(gemm)),
                sm90::min_saved_k_blocks(gemm));
      expect_agrees_with_plain(kSm90Backend, *data, 0);
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
  // up to eight tokens a run under bf16 is one kernel with another order of sums
  // (sm90_decode_test.cpp)
  for (const ActivationFormat format : kFormats)
    expect_run_is_its_steps(kSm90Backend, format == ActivationFormat::kBf16 ? 9 : 3,
                            IntermediateScale::kDynamicToken, DataKind::kNan, format);
  expect_run_is_its_steps(kSm90Backend, 36, IntermediateScale::kFixed, DataKind::kNormal);
}

// With these assignments a cta of route and quantize has more threads than a token.
TEST_F(Sm90SmallLayer, ManyAssignmentsOfOneCta) {
  for (const ActivationFormat format : kFormats) {
    const auto data = must(make_case(small({64, 4, 160, Routing::kPartlyNone}, format, 64, 48)));
    CaseRun own(kSm90Backend, *data), parts(kSm90Backend, *data);
    ASSERT_TRUE(own.ok() && parts.ok());
    run_against_steps(own, parts, *data);
  }
}

// With this many tokens a warp quantizes each token, and hidden is copied to the rows as it is
// quantized.
TEST_F(Sm90SmallLayer, ManyTokensAreQuantizedByWarps) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
    Case spec = small({64, 2, 2200, Routing::kPartlyNone}, format, 528);
    spec.data = DataKind::kNan;
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
    Case spec = small({64, 2, 2200, Routing::kUniform}, ActivationFormat::kBf16, 528);
    spec.hidden_dtype = dtype;
    auto data = must(make_case(spec));
    ASSERT_TRUE(sm90::kGemmConfigs[Sm90Layer::routed_config(spec, data->config)].tma_rows);
    const auto fill = [&](int64_t token, uint16_t bf16) {
      const int64_t bytes = bits(dtype) / 8;
      for (int64_t i = token * 528; i < (token + 1) * 528; ++i) {
        uint8_t* const element = data->hidden.data() + i * bytes;
        std::fill(element, element + bytes, uint8_t{0});
        std::memcpy(element + bytes - 2, &bf16, 2);  // the upper half of fp32
      }
    };
    fill(3, 0x7FC0);     // NaN
    fill(1200, 0x7F00);  // 2^127: the accumulators overflow
    CaseRun plain(kCudaBackend, *data), own(kSm90Backend, *data);
    ASSERT_TRUE(plain.ok() && own.ok());
    const auto expected = to_floats(plain.run(*data), spec.out_dtype),
               actual = to_floats(own.run(*data), spec.out_dtype);
    uint64_t outputs = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(std::isfinite(expected[i]), std::isfinite(actual[i])) << i / 528 << " " << i % 528;
      outputs += !std::isfinite(actual[i]);
    }
    for (const CaseRun* run : {&plain, &own}) {
      const RunStatus& counts = *run->buffers().status;
      EXPECT_EQ(counts.nonfinite_tokens, 1u);
      EXPECT_EQ(counts.nonfinite_rows, 4u);
      EXPECT_EQ(counts.nonfinite_outputs, outputs);
    }
    EXPECT_EQ(own.broken_guard(), -1);
  }
}

// Accumulators are 2^19 times below their values until the epilogue. Values far below 1 are
// subnormal there, and still count.
TEST_F(Sm90Layer, TinyIntermediatesCount) {
  Case spec = ragged_case({4, 2, 14, Routing::kUniform}, ActivationFormat::kBf16);
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
