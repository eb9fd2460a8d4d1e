// What loading touches, counted page by page: one rank of eight, one slice of eight, the scalars; and
// that release gives pages back.
#include "checkpoint/checkpoint.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"
#include "support/touch_counter.h"

namespace nvfp4_moe {
namespace {

using test::CheckpointBuilder;
using test::TempDir;
using test::TouchCounter;

uint64_t resident(const Checkpoint& checkpoint) {
  uint64_t total = 0;
  for (const auto& file : checkpoint.index().files()) total += file->resident_bytes();
  return total;
}

uint64_t read_view(const Nvfp4View& view) {
  uint64_t sum = 0;
  for (int64_t r = 0; r < view.rows; ++r) {
    for (int64_t i = 0; i < view.cols / 2; ++i) sum += view.row_codes(r)[i];
    for (int64_t i = 0; i < view.cols / 16; ++i) sum += view.row_scales(r)[i];
  }
  return sum;
}

// Every byte of the views, as packing reads them.
uint64_t read_all(const LoadedExpert& loaded) {
  return read_view(loaded.source.gate) + read_view(loaded.source.up) + read_view(loaded.source.down);
}

class Residency : public testing::TestWithParam<SourceFormat> {
 protected:
  void SetUp() override {
    CheckpointBuilder builder({.model_type = "qwen3_moe",
                               .format = GetParam(),
                               .layers = 1,
                               .num_experts = 32,
                               .hidden_size = 512,
                               .intermediate_size = 256,
                               .random_codes = true});
    ASSERT_OK(builder.write(dir_.path().string()));
    Result<Checkpoint> opened = Checkpoint::open(dir_.path().string());
    ASSERT_OK(opened);
    checkpoint_.emplace(*std::move(opened));
    total_ = checkpoint_->index().size_bytes();
  }
  TempDir dir_;
  std::optional<Checkpoint> checkpoint_;
  uint64_t total_ = 0;
};

TEST_P(Residency, OneRankOfEightTouchesLessThanASeventh) {
  TouchCounter counter(checkpoint_->index());
  uint64_t sum = 0;
  for (int64_t e = 8; e < 12; ++e) {
    Result<LoadedExpert> loaded = checkpoint_->expert(0, e);
    ASSERT_OK(loaded);
    sum += read_all(*loaded);
  }
  EXPECT_GT(sum, 0u);
  EXPECT_LT(counter.touched_bytes(), total_ / 7) << "of " << total_;
  EXPECT_GE(counter.touched_bytes(), total_ / 8 - 8192) << "the counter counts";
}

TEST_P(Residency, ValidatingOneRankReadsScalesOnly) {
  TouchCounter counter(checkpoint_->index());
  ASSERT_OK(checkpoint_->validate(0, {8, 4}));
  ASSERT_OK(checkpoint_->statistics(0, {8, 4}));
  // 4 experts of 3 matrices: at most the scales' bytes and two page ends for each of four tensors.
  EXPECT_LT(counter.touched_bytes(), 4u * 3u * (512u * 256u / 16u + 6u * 4096u));
}

TEST_P(Residency, ScalarsOfAllExpertsTouchAtMostAPageEach) {
  TouchCounter counter(checkpoint_->index());
  ASSERT_OK(checkpoint_->layer_scales(0));
  EXPECT_LE(counter.touched_bytes(), 32u * 3u * 4096u);
}

TEST_P(Residency, OpeningAgainTouchesNothingAndReleaseGivesBack) {
  // The header's pages, and what one fault there maps around itself.
  const uint64_t header = checkpoint_->index().files().front()->header().data_offset + (64u << 10);
  ASSERT_LT(header, total_ / 32);
  EXPECT_LE(resident(*checkpoint_), header);
  ASSERT_OK(checkpoint_->layer_scales(0));
  EXPECT_LE(resident(*checkpoint_), header);
  Result<LoadedExpert> loaded = checkpoint_->expert(0, 17);
  ASSERT_OK(loaded);
  EXPECT_GT(read_all(*loaded), 0u);
  EXPECT_GE(resident(*checkpoint_), total_ / 32);
  checkpoint_->release(0, 17);
  EXPECT_LE(resident(*checkpoint_), header);
}

INSTANTIATE_TEST_SUITE_P(Formats, Residency,
                         testing::Values(SourceFormat::kModelOpt, SourceFormat::kCompressedTensors,
                                         SourceFormat::kMxfp4),
                         [](const auto& param) {
                           return param.param == SourceFormat::kModelOpt ? "modelopt"
                                  : param.param == SourceFormat::kMxfp4  ? "mxfp4"
                                                                         : "compressed_tensors";
                         });

// A slice's rows of gate and up lie together. Its columns of down lie in every row: in bytes an eighth, in pages only
// where a row's eighth is a page or more, which no model has. So down's pages are all touched, gate's and up's are not.
TEST(SliceResidency, OneSliceOfEightTouchesItsRowsAndItsColumns) {
  CheckpointBuilder builder({.model_type = "qwen3_moe",
                             .layers = 1,
                             .num_experts = 2,
                             .hidden_size = 512,
                             .intermediate_size = 1024,
                             .random_codes = true});
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  const TensorIndex& index = checkpoint->index();
  TouchCounter counter(index);
  Result<LoadedExpert> loaded = checkpoint->expert(0, 1, {256, 128});
  ASSERT_OK(loaded);
  EXPECT_GT(read_all(*loaded), 0u);
  EXPECT_TRUE(loaded->storage.empty());
  for (const char* projection : {"gate", "up"}) {
    const TensorIndex::Ref ref = index.find(builder.tensor_name(0, 1, projection, "codes"));
    EXPECT_LE(counter.touched_bytes(ref.data(), ref.info->size_bytes()), ref.info->size_bytes() / 8 + 2 * 4096)
        << projection;
  }
  for (const char* projection : {"gate", "up", "down"}) {  // of the other expert: the pages at its borders at most
    const TensorIndex::Ref ref = index.find(builder.tensor_name(0, 0, projection, "codes"));
    EXPECT_LE(counter.touched_bytes(ref.data(), ref.info->size_bytes()), 2 * 4096u) << projection;
  }
  const auto& down = loaded->source.down;
  EXPECT_EQ(down.rows * (down.cols / 2) * 8, 512 * 1024 / 2);
}

}  // namespace
}  // namespace nvfp4_moe
