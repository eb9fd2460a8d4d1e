// The configurations of the Hopper backend: the choice for a batch, and that each has its kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "backend/sm90/config.h"
#include "backend/sm90/config_table.h"
#include "backend/sm90/kernels.h"
#include "cases/cases.h"

namespace nvfp4_moe::internal::test {
namespace {

// A rank with some of the experts may get all assignments of a batch; a whole layer gets the number
// that the host counts.
TEST(Sm90Config, RanksWithAPartOfTheExpertsMayTakeWideTiles) {
  MoeOptions options = case_table().front().options;
  options.num_experts = 384;
  options.top_k = 8;
  MoeOptions without_gate = options, gelu = options;  // have no kernels with wide tiles
  without_gate.activation = Activation::kRelu2;
  gelu.activation = Activation::kGeluTanh;
  for (const sm90::ConfigTable* table : {&sm90::kBf16Table, &sm90::kFp8Table}) {
    SCOPED_TRACE(table->configs.front().name);
    const auto config_of = [&](const MoeOptions& of, int64_t experts, int64_t tokens) {
      const auto config = *MoeConfig::make(of);
      const int index = sm90::routed_config(*table, config, {0, experts}, tokens);
      return table->configs[static_cast<size_t>(index)];
    };
    for (const int64_t tokens : {1, 8, 32, 33, 64, 120, 256, 512, 900}) {
      const auto rank = config_of(options, 48, tokens), layer = config_of(options, 384, tokens);
      EXPECT_LT(layer.wide, 0) << tokens;
      EXPECT_EQ(rank.wide, tokens > 32 && !layer.tma_rows ? sm90::kWideConfig : -1) << tokens;
      if (!layer.tma_rows) {
        EXPECT_EQ(rank.tile_n, layer.tile_n) << tokens;
      }
    }
    std::set<std::pair<std::string, int>> chosen;  // by name, and with a wide one or without
    for (int64_t tokens = 1; tokens <= 8192; tokens += 1 + tokens / 16)
      for (const int64_t experts : {4, 48, 384}) {
        MoeOptions layer = options;
        set_sizes(layer, experts == 4 ? 4 : 384, experts == 4 ? 2 : 8, 1040, 720);
        const sm90::GemmConfig config = config_of(layer, experts, tokens);
        chosen.emplace(config.name, config.wide);
      }
    EXPECT_EQ(chosen.size(), table->configs.size()) << "one is never chosen";
    EXPECT_EQ(config_of(options, 48, 512).tile_n, 32);
    EXPECT_EQ(config_of(options, 48, 1024).wide, -1);
    EXPECT_EQ(config_of(options, 48, 4096).tile_n, 128);
    EXPECT_EQ(config_of(options, 384, 1024).tile_n, 64);
    EXPECT_LT(config_of(without_gate, 48, 256).wide, 0);
    EXPECT_LT(config_of(gelu, 48, 256).wide, 0);
    const sm90::GemmConfig& wide = table->configs[sm90::kWideConfig];
    EXPECT_EQ(wide.tile_n, 128);
    EXPECT_EQ(wide.min_n, 8);  // a cold expert's rows, next to a hot one's
    for (const int64_t tokens : {1, 8, 9, 32, 33, 64, 65, 1000}) {
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
    EXPECT_EQ(kernels.gemm1_narrow_or_wide != nullptr && kernels.gemm2_narrow_or_wide != nullptr,
              with_wide);
    EXPECT_EQ(kernels.gemm1_tma != nullptr && kernels.gemm2_tma != nullptr, tma && !with_wide);
    EXPECT_EQ(kernels.gemm1 != nullptr && kernels.gemm2 != nullptr, !tma && !with_wide);
    EXPECT_EQ(kernels.gemm1_fused_routing != nullptr,
              sm90::kGemmConfigs[i].tile_n == 8 && !with_wide);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
