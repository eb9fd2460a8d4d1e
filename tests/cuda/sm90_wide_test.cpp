// The Hopper backend's experts with more rows than a narrow tile holds, which a wide configuration multiplies in launches
// of its own: what route lists for either, and what both launches compute.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/scratch.h"
#include "backend/sm90/config.h"
#include "cases/cases.h"
#include "judge/judge.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

class Sm90WideExperts : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = test::why_not_here(kSm90Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

// A batch that gives each local expert of a rank so many rows, which lie apart; a few tokens more are another rank's.
CaseData batch_with_rows(Case spec, const std::vector<int64_t>& rows) {
  constexpr int64_t kStep = 7;
  const auto experts = static_cast<int64_t>(rows.size());
  spec.options.num_experts = 3 * experts;
  spec.range = {experts, experts};
  spec.tokens = 20 + std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (spec.tokens % kStep == 0) ++spec.tokens;  // so that t * kStep goes through all of them
  auto data = make_case(spec);
  EXPECT_OK(data);
  std::vector<int64_t> ids;
  for (int64_t e = 0; e < experts; ++e)
    ids.insert(ids.end(), static_cast<size_t>(rows[static_cast<size_t>(e)]), experts + e);
  ids.resize(static_cast<size_t>(spec.tokens), 0);
  for (int64_t t = 0; t < spec.tokens; ++t) {
    data->set_id(t, 0, ids[static_cast<size_t>(t * kStep % spec.tokens)]);
    data->set_id(t, 1, t % 2 == 0 ? -1 : 1);
  }
  return *data;
}

// What route has listed, from the mirror of a run's workspace.
struct ListedTiles {
  std::vector<cuda::RowTile> narrow, wide;
  explicit ListedTiles(const test::CaseRun& run) {
    const auto offset_of = [&](const std::string& name) {
      for (const auto& span : run.plan().workspace.spans)
        if (span.name == name) return span.offset_bytes;
      ADD_FAILURE() << "no span " << name;
      return size_t{0};
    };
    const auto* const base =
        reinterpret_cast<const std::byte*>(run.buffers().row_of_assignment) - offset_of("row_of_assignment");
    const auto read = [&](const std::string& tiles, const std::string& count, std::vector<cuda::RowTile>& to) {
      int32_t listed = 0;
      std::memcpy(&listed, base + offset_of(count), sizeof(listed));
      to.resize(static_cast<size_t>(listed));
      std::memcpy(to.data(), base + offset_of(tiles), to.size() * sizeof(cuda::RowTile));
    };
    read("cuda.tiles", "cuda.tile_count", narrow);
    read("cuda.wide_tiles", "cuda.wide_tile_count", wide);
  }
};

// A run of each narrow configuration with the wide one behind it: its outputs, and that route has shared the experts out
// as the plan says, the widest tiles first, with each row in one tile.
void expect_wide_beside_narrow(Case spec, const std::vector<int64_t>& extra_rows, ActivationFormat format) {
  for (int config = sm90::kFirstWithWide; config < sm90::kWideConfig; ++config) {
    const int64_t n = sm90::kGemmConfigs[static_cast<size_t>(config)].tile_n;
    spec.options.activation_format = format;
    std::vector<int64_t> expert_rows;
    for (int64_t extra : extra_rows) expert_rows.push_back(extra <= -n ? 0 : n + extra);
    const CaseData data = batch_with_rows(spec, expert_rows);
    SCOPED_TRACE(testing::Message() << "tiles of " << n << ", " << to_string(format));
    test::CaseRun plain(kCudaBackend, data), own(kSm90Backend, data, -1, config);
    ASSERT_TRUE(plain.ok() && own.ok());
    const auto expected = test::to_floats(plain.run(data), data.spec.out_dtype);
    const std::vector<uint8_t> bytes = own.run(data);
    const auto actual = test::to_floats(bytes, data.spec.out_dtype);
    EXPECT_EQ(broken_limit(compare(expected.data(), actual.data(), data.spec.tokens, data.spec.options.hidden_size),
                           layer_limits(data.config, data.spec.tokens)),
              "");
    EXPECT_EQ(own.broken_guard(), -1);
    const ListedTiles tiles(own);
    std::vector<int64_t> found(expert_rows.size());
    for (const auto* list : {&tiles.narrow, &tiles.wide}) {
      const bool wide = list == &tiles.wide;
      int32_t before = 1 << 20;
      for (const cuda::RowTile& tile : *list) {
        const auto e = static_cast<size_t>(tile.expert);
        EXPECT_EQ(expert_rows[e] > n, wide) << "expert " << e;
        EXPECT_LE(tile.rows, wide ? 128 : n);
        EXPECT_EQ(tile.first_row, own.buffers().routed.row_offsets[e] + found[e]) << "expert " << e;
        found[e] += tile.rows;
        if (wide && tile.first_row == own.buffers().routed.row_offsets[e]) {
          EXPECT_LE(tile.rows, before) << "expert " << e;
          before = (tile.rows + 7) / 8 * 8;
        }
      }
    }
    EXPECT_EQ(found, expert_rows);
    ASSERT_EQ(own.run(data), bytes) << "a repeat differs";
    EXPECT_EQ(test::difference(own.run_steps(data), bytes, data.spec.out_dtype, data.spec.options.hidden_size), "");
  }
}

// Rows of an expert beyond a narrow tile's: at the bound and on both sides of it, several wide tiles, none. K is long
// enough for wide tiles to be split along it.
TEST_F(Sm90WideExperts, StandBesideNarrowOnes) {
  Case spec = test::ragged_case({4, 2, 1, Routing::kUniform}, ActivationFormat::kBf16);
  spec.options.hidden_size = 1808;
  spec.options.intermediate_size = 144;
  for (ActivationFormat format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4})
    expect_wide_beside_narrow(spec, {0, 1, -64, 133, -7}, format);
}
// All of them wide, all narrow, and no row at all: one of the launches, or both, finds an empty list.
TEST_F(Sm90WideExperts, AreAllOrNone) {
  Case spec = test::ragged_case({4, 2, 1, Routing::kUniform}, ActivationFormat::kBf16);
  spec.options.hidden_size = 272;
  spec.options.intermediate_size = 144;
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{1, 9, 40, 2}, std::vector<int64_t>{0, -7, 0, -1, 0, 0}, std::vector<int64_t>(36, -64)})
    expect_wide_beside_narrow(spec, rows, ActivationFormat::kBf16);
}

}  // namespace
}  // namespace nvfp4_moe
