// A float checkpoint that quantizes in milliseconds, into several shards.
#pragma once

#include <string>

#include "durability/crash_images.h"
#include "quantize/models.h"

namespace nvfp4_moe::internal::test {

inline SynthesizeOptions small_sizes() {
  SynthesizeOptions sizes = tiny_model();
  sizes.family = "qwen3_moe";
  sizes.top_k = 1;
  return sizes;
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
    EXPECT_GE(must(quantize_checkpoint(in, whole, options))->shards, 4);
    expected = read_image(whole);
  }
};

}  // namespace nvfp4_moe::internal::test
