// The bytes that loading reads, as counted by the system. No file is mapped.
#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>

#include "checkpoint/checkpoint.h"
#include "checkpoint/experts.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// Bytes that this process has read by system calls, from any file, even from the page cache;
// without the bytes that querying the count reads.
class ReadCounter {
 public:
  ReadCounter() : start_(now()) {}
  uint64_t read_bytes() const { return now() - start_; }

 private:
  static uint64_t now() {
    static uint64_t of_counting = 0;
    char text[512] = {};
    const int file = ::open("/proc/self/io", O_RDONLY | O_CLOEXEC);
    const ssize_t size = ::read(file, text, sizeof(text) - 1);
    ::close(file);
    uint64_t rchar = 0;
    EXPECT_TRUE(size > 0 && std::sscanf(text, "rchar: %" SCNu64, &rchar) == 1);
    const uint64_t counted = rchar - of_counting;
    of_counting += static_cast<uint64_t>(size);
    return counted;
  }
  uint64_t start_;
};

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
    auto opened = must(Checkpoint::open(dir_.path().string()));
    checkpoint_.emplace(*std::move(opened));
    total_ = checkpoint_->index().size_bytes();
  }
  TempDir dir_;
  std::optional<Checkpoint> checkpoint_;
  uint64_t total_ = 0;
};

TEST_P(Residency, OneRankOfEightTouchesLessThanASeventh) {
  const ReadCounter counter;
  uint64_t sum = 0;
  for (int64_t e = 8; e < 12; ++e) {
    auto loaded = must(checkpoint_->expert(0, e));
    sum += read_all(*loaded);
  }
  EXPECT_GT(sum, 0u);
  EXPECT_LE(counter.read_bytes(), total_ / 8) << "of " << total_;
  EXPECT_GE(counter.read_bytes(), total_ / 8 - total_ / 80) << "the counter counts";
}

TEST_P(Residency, ValidatingOneRankReadsScalesOnly) {
  const ReadCounter counter;
  ASSERT_OK(checkpoint_->validate(0, {8, 4}));
  ASSERT_OK(checkpoint_->statistics(0, {8, 4}));
  // 4 experts of 3 matrices, twice: the scales' bytes and two scalars.
  EXPECT_LE(counter.read_bytes(), 2u * 4u * 3u * (512u * 256u / 16u + 8u));
  EXPECT_GE(counter.read_bytes(), 2u * 4u * 3u * (512u * 256u / 32u));
}

TEST_P(Residency, ScalarsOfAllExpertsAreReadAlone) {
  const ReadCounter counter;
  ASSERT_OK(checkpoint_->layer_scales(0));
  EXPECT_LE(counter.read_bytes(), 32u * 3u * 4u);
}

TEST_P(Residency, NoFileIsMapped) {
  ASSERT_OK(checkpoint_->layer_scales(0));
  ASSERT_OK(checkpoint_->validate(0, {}));
  auto loaded = must(checkpoint_->expert(0, 17));
  EXPECT_GT(read_all(*loaded), 0u);
  for (const auto& file : checkpoint_->index().files())
    EXPECT_FALSE(is_mapped(file->path())) << file->path();
}

INSTANTIATE_TEST_SUITE_P(Formats, Residency,
                         testing::Values(SourceFormat::kModelOpt, SourceFormat::kCompressedTensors,
                                         SourceFormat::kMxfp4),
                         [](const auto& param) {
                           return param.param == SourceFormat::kModelOpt ? "modelopt"
                                  : param.param == SourceFormat::kMxfp4  ? "mxfp4"
                                                                         : "compressed_tensors";
                         });

// A slice's rows of gate and up are contiguous. Its columns of down are an eighth of every row, and
// the bytes between them are read too.
TEST(SliceResidency, OneSliceOfEightReadsItsRowsAndItsColumns) {
  const Opened checkpoint(CheckpointBuilder({.model_type = "qwen3_moe",
                                             .layers = 1,
                                             .num_experts = 2,
                                             .hidden_size = 512,
                                             .intermediate_size = 1024,
                                             .random_codes = true}));
  const ReadCounter counter;
  auto loaded = must(checkpoint->expert(0, 1, {256, 128}));
  EXPECT_GT(read_all(*loaded), 0u);
  constexpr uint64_t kMatrix = 512 * 1024 / 2 + 512 * 1024 / 16;  // codes and block scales
  EXPECT_LE(counter.read_bytes(), 2 * kMatrix / 8 + kMatrix + 3 * 4);
  const auto& down = loaded->source.down;
  EXPECT_EQ(down.rows * (down.cols / 2) * 8, 512 * 1024 / 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
