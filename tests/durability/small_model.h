// A float checkpoint that quantizes in milliseconds, into several shards.
#pragma once

#include <fstream>
#include <string>

#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "durability/crash_images.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

inline SynthesizeOptions small_sizes() {
  return {.family = "qwen3_moe",
          .layers = 1,
          .num_experts = 2,
          .top_k = 1,
          .hidden_size = 32,
          .intermediate_size = 16,
          .vocab_size = 16};
}

struct SmallModel {
  TempDir dir;
  std::string in = dir.file("in");
  QuantizeOptions options;
  Image expected;  // what an undisturbed run makes

  SmallModel() {
    EXPECT_OK(synthesize_checkpoint(in, small_sizes()));
    std::ofstream(in + "/tokenizer.json") << "{\"a\": 1}";
    std::filesystem::create_directory(in + "/encoding");
    std::ofstream(in + "/encoding/code.py") << "pass";
    options.max_shard_bytes = 3 << 10;
    const std::string whole = dir.file("whole");
    const auto result = quantize_checkpoint(in, whole, options);
    EXPECT_OK(result);
    EXPECT_TRUE(result.ok() && result->shards >= 4);
    expected = read_image(whole);
  }
};

}  // namespace nvfp4_moe::internal::test
