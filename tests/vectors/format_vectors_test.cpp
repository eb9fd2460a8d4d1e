// The committed vectors (tests/vectors/make_format_vectors.py): the results of ModelOpt, torchao
// and compressed-tensors for inputs at no tie and no guard, so that there is one right answer; and
// torchao's 128x4 layout.

#include <bit>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dequantize.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
#include "safetensors/safetensors.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class FormatVectors : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto opened = SafetensorsFile::open(NVFP4_MOE_SOURCE_DIR "/tests/vectors/formats.safetensors");
    ASSERT_OK(opened.status());
    file_ = std::make_unique<SafetensorsFile>(std::move(*opened));
  }
  static void TearDownTestSuite() { file_.reset(); }

  template <class T>
  static std::vector<T> tensor(const std::string& name) {
    const TensorInfo* info = file_->find(name);
    if (info == nullptr) throw std::runtime_error("no tensor " + name);
    return read_tensor<T>(*file_, *info);
  }
  static std::unique_ptr<SafetensorsFile> file_;
};
std::unique_ptr<SafetensorsFile> FormatVectors::file_;

// (8, 64): codes are compared modulo -0, since ModelOpt drops its sign.
constexpr int64_t kRows = 8;
constexpr int64_t kCols = 64;

TEST_F(FormatVectors, QuantizersGiveTheOraclesBytes) {
  for (const std::string oracle : {"modelopt", "torchao", "compressed_tensors"}) {
    const std::vector<float> x = tensor<float>(oracle + ".x");
    const float scale = tensor<float>(oracle + ".tensor_scale").at(0);
    const std::vector<uint8_t> expected = tensor<uint8_t>(oracle + ".codes");
    std::vector<uint8_t> codes(kRows * kCols / 2);
    std::vector<uint8_t> scales(kRows * kCols / kBlockElems);
    QuantizeCounts counts;
    ASSERT_OK(quantize_weights(x, kRows, kCols, scale, ScaleSearch::kMax, codes.data(),
                               scales.data(), counts));
    EXPECT_EQ(scales, tensor<uint8_t>(oracle + ".scales")) << oracle;
    ASSERT_EQ(codes.size(), expected.size());
    const auto without_negative_zero = [](uint8_t code) { return code == 8 ? uint8_t{0} : code; };
    for (size_t i = 0; i < codes.size(); ++i) {
      EXPECT_EQ(without_negative_zero(low_code(codes[i])),
                without_negative_zero(low_code(expected[i])))
          << oracle << i;
      EXPECT_EQ(without_negative_zero(high_code(codes[i])),
                without_negative_zero(high_code(expected[i])))
          << i;
    }
  }
}

TEST_F(FormatVectors, DequantizeGivesModelOptsBits) {
  const std::vector<uint8_t> codes = tensor<uint8_t>("modelopt.codes");
  const std::vector<uint8_t> scales = tensor<uint8_t>("modelopt.scales");
  const std::vector<float> expected = tensor<float>("modelopt.decoded");
  std::vector<float> decoded(kRows * kCols);
  ASSERT_OK(
      dequantize(Nvfp4View::contiguous(codes.data(), scales.data(),
                                       tensor<float>("modelopt.tensor_scale").at(0), kRows, kCols),
                 DType::kF32, decoded.data()));
  for (size_t i = 0; i < decoded.size(); ++i) {
    if (decoded[i] == 0 && expected[i] == 0) continue;  // ModelOpt decodes code 8 (-0) as +0
    EXPECT_EQ(std::bit_cast<uint32_t>(decoded[i]), std::bit_cast<uint32_t>(expected[i])) << i;
  }
}

TEST_F(FormatVectors, SwizzleGivesTorchaosBytesBothWays) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {130, 5}, {33, 8}};
  for (const auto& [rows, cols] : kShapes) {
    const std::string name = "blocked." + std::to_string(rows) + "x" + std::to_string(cols);
    const std::vector<uint8_t> linear = tensor<uint8_t>(name + ".linear");
    const std::vector<uint8_t> expected = tensor<uint8_t>(name + ".swizzled");
    std::vector<uint8_t> swizzled(static_cast<size_t>(swizzled_scale_bytes(rows, cols)), 0xAA);
    swizzle_scales(linear.data(), cols, rows, cols, swizzled.data());
    EXPECT_EQ(swizzled, expected) << name;
    std::vector<uint8_t> back(linear.size(), 0xAA);
    unswizzle_scales(expected.data(), rows, cols, back.data(), cols);
    EXPECT_EQ(back, linear) << name;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
