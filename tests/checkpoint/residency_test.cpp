// The bytes that loading reads, as counted by the system. No file is mapped.
#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>

#include "checkpoint/experts.h"

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

TEST(Residency, ARankReadsItsExpertsAndValidatingOnlyScales) {
  for (const SourceFormat format :
       {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors, SourceFormat::kMxfp4}) {
    SCOPED_TRACE(to_string(format));
    const Opened checkpoint(CheckpointBuilder({.model_type = "qwen3_moe",
                                               .format = format,
                                               .layers = 1,
                                               .num_experts = 32,
                                               .hidden_size = 512,
                                               .intermediate_size = 256,
                                               .random_codes = true}));
    const uint64_t total = checkpoint->index().size_bytes();
    const ReadCounter one_rank;  // of eight
    uint64_t sum = 0;
    for (int64_t e = 8; e < 12; ++e) sum += read_all(*must(checkpoint->expert(0, e)));
    EXPECT_GT(sum, 0u);
    EXPECT_LE(one_rank.read_bytes(), total / 8) << "of " << total;
    EXPECT_GE(one_rank.read_bytes(), total / 8 - total / 80) << "the counter counts";

    const ReadCounter validating;
    ASSERT_OK(checkpoint->validate(0, {8, 4}));
    ASSERT_OK(checkpoint->statistics(0, {8, 4}));
    // 4 experts of 3 matrices, twice: the scales' bytes and two scalars.
    EXPECT_LE(validating.read_bytes(), 2u * 4u * 3u * (512u * 256u / 16u + 8u));
    EXPECT_GE(validating.read_bytes(), 2u * 4u * 3u * (512u * 256u / 32u));

    const ReadCounter scalars;
    ASSERT_OK(checkpoint->layer_scales(0));
    EXPECT_LE(scalars.read_bytes(), 32u * 3u * 4u);
    for (const auto& file : checkpoint->index().files())
      EXPECT_FALSE(is_mapped(file->path())) << file->path();
  }
}

// A slice's rows of gate and up are contiguous. Its columns of down are an eighth of every row, and
// the bytes between them are read too.
TEST(Residency, OneSliceOfEightReadsItsRowsAndItsColumns) {
  const Opened checkpoint(CheckpointBuilder({.model_type = "qwen3_moe",
                                             .layers = 1,
                                             .num_experts = 2,
                                             .hidden_size = 512,
                                             .intermediate_size = 1024,
                                             .random_codes = true}));
  const ReadCounter counter;
  EXPECT_GT(read_all(*must(checkpoint->expert(0, 1, {256, 128}))), 0u);
  constexpr uint64_t kMatrix = 512 * 1024 / 2 + 512 * 1024 / 16;  // codes and block scales
  EXPECT_LE(counter.read_bytes(), 2 * kMatrix / 8 + kMatrix + 3 * 4);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
