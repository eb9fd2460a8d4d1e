// The configurations of the Hopper backend: the choice for a batch, and that each has its kernels.
#include <gtest/gtest.h>

#include <algorithm>

#include "backend/sm90/config.h"
#include "backend/sm90/config_table.h"
#include "backend/sm90/kernels.h"
#include "cases/cases.h"

namespace nvfp4_moe::internal::test {
namespace {

// A rank with some of the experts may get all assignments of a batch; a whole layer gets the number
// that the host counts.
TEST(Sm90Backend, RanksWithAPartOfTheExpertsMayTakeWideTiles) {
  MoeOptions options = case_table().front().options;
  options.num_experts = 384;
  options.top_k = 8;
  for (const sm90::ConfigTable* table : {&sm90::kBf16Table, &sm90::kFp8Table}) {
    SCOPED_TRACE(table->configs.front().name);
    const auto config = *MoeConfig::make(options);
    const auto config_of = [&](int64_t experts, int64_t tokens) {
      return table
          ->configs[static_cast<size_t>(sm90::routed_config(*table, config, {0, experts}, tokens))];
    };
    for (int64_t tokens : {1, 8, 32}) EXPECT_LT(config_of(48, tokens).wide, 0) << tokens;
    for (int64_t tokens : {33, 64, 120, 256, 512, 900}) {
      const sm90::GemmConfig rank = config_of(48, tokens), layer = config_of(384, tokens);
      EXPECT_LT(layer.wide, 0) << tokens;
      if (layer.tma_rows) continue;
      EXPECT_EQ(rank.tile_n, layer.tile_n) << tokens;
      EXPECT_EQ(rank.wide, sm90::kWideConfig) << tokens;
    }
    EXPECT_EQ(config_of(48, 512).tile_n, 32);
    EXPECT_EQ(config_of(48, 1024).wide, -1);
    EXPECT_EQ(config_of(48, 4096).tile_n, 128);
    EXPECT_EQ(config_of(384, 1024).tile_n, 64);
    const sm90::GemmConfig& wide = table->configs[sm90::kWideConfig];
    EXPECT_EQ(wide.tile_n, 128);
    EXPECT_EQ(wide.min_n, 8);  // a cold expert's rows, next to a hot one's
    MoeOptions without_gate = options;
    without_gate.activation = Activation::kRelu2;
    EXPECT_LT(table
                  ->configs[static_cast<size_t>(
                      sm90::routed_config(*table, *MoeConfig::make(without_gate), {0, 48}, 256))]
                  .wide,
              0);
    for (int64_t tokens : {1, 8, 9, 32, 33, 64, 65, 1000}) {
      const sm90::GemmConfig& shared =
          table->configs[static_cast<size_t>(sm90::shared_config(*table, tokens))];
      EXPECT_LT(shared.wide, 0);
      EXPECT_GE(shared.tile_n, std::min<int64_t>(tokens, 128));
    }
  }
}

// The launcher finds a configuration's kernels by its index. Each configuration has both GEMMs for
// its kind of rows.
TEST(Sm90Kernels, AreInTheOrderOfTheConfigurations) {
  for (size_t i = 0; i < sm90::kGemmConfigs.size(); ++i) {
    SCOPED_TRACE(sm90::kGemmConfigs[i].name);
    const sm90::KernelEntry& kernels = sm90::kernel_entry(i);
    EXPECT_EQ(kernels.config, i);
    const bool tma = sm90::kGemmConfigs[i].tma_rows, with_wide = sm90::kGemmConfigs[i].wide >= 0;
    EXPECT_EQ(sm90::kGemmConfigs[i].fp8, i >= sm90::kBf16Configs);
    EXPECT_EQ(kernels.gemm1_either != nullptr && kernels.gemm2_either != nullptr, with_wide);
    EXPECT_EQ(kernels.gemm1_tma != nullptr && kernels.gemm2_tma != nullptr, tma && !with_wide);
    EXPECT_EQ(kernels.gemm1 != nullptr && kernels.gemm2 != nullptr, !tma && !with_wide);
    EXPECT_EQ(kernels.gemm1_fused_routing != nullptr,
              sm90::kGemmConfigs[i].tile_n == 8 && !with_wide);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
