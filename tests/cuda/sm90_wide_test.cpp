// Kernels of the Hopper backend that contain a narrow and a wide configuration.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/sizes.h"
#include "backend/sm90/config.h"
#include "cases/cases.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int kFirstWithWide = 5;  // configurations from here to kWideConfig have a wide one

class Sm90WideTiles : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(kSm90Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

// A batch that gives each local expert of a rank this many rows, from tokens that are far apart. A
// few more tokens belong to another rank.
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

// The tiles that route has listed, from the mirror of a run's workspace.
struct ListedTiles {
  std::vector<cuda::RowTile> tiles;
  int32_t wide = 0;
  explicit ListedTiles(const CaseRun& run) {
    const auto* const first = reinterpret_cast<const std::byte*>(run.buffers().row_of_assignment);
    const auto span = [&](const std::string& name) {
      for (const auto& span : run.plan().workspace.spans)
        if (span.name == name) return span.offset_bytes;
      ADD_FAILURE() << "no span " << name;
      return size_t{0};
    };
    const std::byte* const base = first - span("row_of_assignment");
    int32_t count = 0;
    std::memcpy(&count, base + span("cuda.tile_count"), sizeof(count));
    std::memcpy(&wide, base + span("cuda.lists_wide"), sizeof(wide));
    tiles.resize(static_cast<size_t>(count));
    std::memcpy(tiles.data(), base + span("cuda.tiles"), tiles.size() * sizeof(cuda::RowTile));
  }
};

// Runs a narrow configuration that may use the wide one, on experts with these row counts. Checks
// the outputs, and that the list is of the kind that the sum of rows requires, that each row is in
// one tile, and that the widest tiles of a wide list come first.
void expect_right(Case spec, int config, const std::vector<int64_t>& expert_rows,
                  ActivationFormat format) {
  const int64_t n = sm90::kGemmConfigs[static_cast<size_t>(config)].tile_n;
  spec.options.activation_format = format;
  const CaseData data = batch_with_rows(spec, expert_rows);
  SCOPED_TRACE(testing::Message() << "tiles of " << n << ", " << to_string(format));
  CaseRun plain(kCudaBackend, data), own(kSm90Backend, data, -1, config);
  ASSERT_TRUE(plain.ok() && own.ok());
  const std::vector<uint8_t> bytes = own.run(data);
  EXPECT_EQ(beyond_limits(data, plain.run(data), bytes), "");
  EXPECT_EQ(own.broken_guard(), -1);
  const ListedTiles list(own);
  const int64_t rows = std::accumulate(expert_rows.begin(), expert_rows.end(), int64_t{0});
  const bool wide = rows > n * static_cast<int64_t>(expert_rows.size());
  EXPECT_EQ(list.wide, wide) << rows << " rows";
  std::vector<int64_t> found(expert_rows.size());
  int32_t before = 1 << 20;
  for (const cuda::RowTile& tile : list.tiles) {
    const auto e = static_cast<size_t>(tile.expert);
    EXPECT_GT(tile.rows, 0);
    EXPECT_LE(tile.rows, wide ? 128 : n) << "expert " << e;
    EXPECT_EQ(tile.first_row, own.buffers().routed.row_offsets[e] + found[e]) << "expert " << e;
    if (wide && found[e] == 0) {
      EXPECT_LE(tile.rows, before) << "expert " << e;
      before = (tile.rows + 7) / 8 * 8;
    }
    found[e] += tile.rows;
  }
  EXPECT_EQ(found, expert_rows);
  ASSERT_EQ(own.run(data), bytes) << "a repeat differs";
  EXPECT_EQ(
      difference(own.run_steps(data), bytes, data.spec.out_dtype, data.spec.options.hidden_size),
      "");
}

// Few and many rows, with sums far from the bound. With many rows, one expert has several tiles and
// others have few rows or none. K is long enough for wide tiles to be split along it.
TEST_F(Sm90WideTiles, AgreeWithThePlainKernels) {
  Case spec = ragged_case({4, 2, 1, Routing::kUniform}, ActivationFormat::kBf16);
  spec.options.hidden_size = 1808;
  spec.options.intermediate_size = 144;
  for (ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kNvfp4, ActivationFormat::kFp8})
    for (int config = kFirstWithWide; config < sm90::kWideConfig; ++config)
      expect_right(spec, config, {9, 33, 0, 133, 1}, format);
}
// On both sides of the bound, and without any row.
TEST_F(Sm90WideTiles, AreListedFromSoManyRowsOn) {
  Case spec = ragged_case({4, 2, 1, Routing::kUniform}, ActivationFormat::kBf16);
  spec.options.hidden_size = 272;
  spec.options.intermediate_size = 144;
  for (int config = kFirstWithWide; config < sm90::kWideConfig; ++config) {
    // of four experts
    const int64_t bound = 4 * sm90::kGemmConfigs[static_cast<size_t>(config)].tile_n;
    EXPECT_EQ(cuda::max_narrow_rows(4, sm90::kGemmConfigs[static_cast<size_t>(config)].tile_n),
              bound);
    expect_right(spec, config, {bound - 9, 0, 7, 2}, ActivationFormat::kBf16);
    expect_right(spec, config, {bound - 9, 1, 7, 2}, ActivationFormat::kBf16);
    expect_right(spec, config, {0, 0, 0, 0}, ActivationFormat::kBf16);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
