// Streams that published programs made (make_csf_vectors.py) against this library's encoder and
// decoder.
#include <nlohmann/json.hpp>

#include "core/csf.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

std::vector<uint8_t> from_hex(const std::string& text) {
  std::vector<uint8_t> out;
  for (size_t i = 0; i < text.size(); i += 2)
    out.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return out;
}

TEST(CsfVectors, EncoderAndDecoderAgreeWithThePublishedOnes) {
  const auto cases =
      nlohmann::json::parse(read_file(NVFP4_MOE_SOURCE_DIR "/tests/vectors/csf.json"));
  ASSERT_EQ(cases.size(), 10u);
  size_t exceptions = 0;
  for (const auto& one : cases) {
    SCOPED_TRACE(one["codec"].get<std::string>() + " " + one["data"].get<std::string>());
    const CsfCodec codec = one["codec"] == "nvfp4" ? CsfCodec::kNvfp4 : CsfCodec::kMxfp4;
    const int64_t rows = one["rows"], cols = one["cols"];
    const std::vector<uint8_t> scales = from_hex(one["scales"]);
    const std::vector<uint8_t> fixed = from_hex(one["fixed"]);
    const std::vector<uint32_t> words = one["exceptions"];
    exceptions += words.size();
    const CsfStreams ours = encode_csf(codec, scales, rows, cols);
    EXPECT_EQ(ours.fixed, fixed);
    EXPECT_EQ(ours.exceptions, words);
    std::vector<uint8_t> decoded(scales.size());
    ASSERT_OK(decode_csf(codec, fixed, words, rows, cols, 0, rows / 16, decoded.data()));
    EXPECT_EQ(decoded, scales);
  }
  EXPECT_GT(exceptions, 500u);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
