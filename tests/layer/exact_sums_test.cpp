// Whole layers in which every sum is exact in fp32, in any order and however wide a tensor core
// adds: the output of every backend has the reference's bits, from one row an expert to 150.
//
// Columns of hidden come in pairs of one value, and the weights of gate and up in pairs (w, -w), so
// that all products count and cancel. The rest of gate is 36 times a power of two, with a SiLU
// equal to itself in fp32; the rest of up is twice one value of hidden. So the intermediate is 9
// times a small power of two times an E2M1 value: exact in bf16, with block scales that are exact
// in E4M3. The products of gemm2 are whole multiples of one step, and their sums are below 2^24 of
// them.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/float_formats.h"
#include "core/random.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kHidden = 1040, kIntermediate = 336;  // neither a multiple of a tile or k-block
constexpr int64_t kExperts = 4, kTopK = 2;
constexpr uint8_t kCodeOf1 = 2, kCodeOf3 = 5, kSign = 8;

void set_code(Nvfp4Buffers& matrix, int64_t cols, int64_t row, int64_t col, uint8_t code) {
  uint8_t& pair = matrix.codes[static_cast<size_t>((row * cols + col) / 2)];
  pair = col % 2 == 0 ? static_cast<uint8_t>((pair & 0xF0) | code)
                      : static_cast<uint8_t>((pair & 0x0F) | code << 4);
}

// (rows, kHidden) of pairs (w, -w) and scales of 1 or 2. put_pair later sets its block's scale to
// 1.
void fill_with_pairs(Nvfp4Buffers& matrix, int64_t rows, Random& random) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < kHidden; col += 2) {
      const auto code = static_cast<uint8_t>(random.below(16));
      set_code(matrix, kHidden, row, col, code);
      set_code(matrix, kHidden, row, col + 1, code ^ kSign);
    }
  for (uint8_t& scale : matrix.block_scales)
    scale = static_cast<uint8_t>(0x38 + 8 * random.below(2));
}

void put_pair(Nvfp4Buffers& matrix, int64_t row, int64_t pair, uint8_t code) {
  for (int64_t col : {2 * pair, 2 * pair + 1}) set_code(matrix, kHidden, row, col, code);
  matrix.block_scales[static_cast<size_t>((row * kHidden + 2 * pair) / 16)] = 0x38;  // 1
}

CaseData exact_case(ActivationFormat format, int64_t tokens) {
  Case spec;
  spec.options = test::sizes_of(kExperts, kTopK, kHidden, kIntermediate);
  spec.options.activation_format = format;
  spec.options.row_format = RowFormat::kFp32;
  spec.range = {0, kExperts};
  spec.tokens = tokens;
  spec.out_dtype = DType::kF32;
  CaseData data = *make_case(spec);
  Random random(static_cast<uint64_t>(tokens));
  for (int64_t e = 0; e < kExperts; ++e) {
    ExpertBuffers& expert = data.experts[static_cast<size_t>(e)];
    fill_with_pairs(expert.gate, kIntermediate, random);
    fill_with_pairs(expert.up, kIntermediate, random);
    for (int64_t row = 0; row < kIntermediate; ++row) {
      put_pair(expert.gate, row, 0, kCodeOf3);  // 2 x 3 x the 6 of every token's first two columns
      put_pair(expert.up, row, 1 + row % (kHidden / 2 - 1), kCodeOf1);
    }
    for (uint8_t& codes : expert.down.codes) codes = static_cast<uint8_t>(random.below(256));
    for (uint8_t& scale : expert.down.block_scales)
      scale = static_cast<uint8_t>(0x38 + 8 * random.below(2));
    const float power = static_cast<float>(1 + e % 2);
    expert.scales = data.tensor_scales[static_cast<size_t>(e)] = {power, 0.5f, 0.25f * power};
  }
  std::vector<uint16_t> hidden;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t block = 0; block < kHidden / 16; ++block) {
      const double power = block == 0 ? 1 : 1 + static_cast<double>(random.below(2));
      for (int64_t pair = 0; pair < 8;
           ++pair) {  // a 6 in each block: its scale is then a power of two
        const double value =
            pair == 0 ? 6.0 : double{e2m1_to_float(static_cast<uint8_t>(random.below(16)))};
        hidden.insert(hidden.end(), 2, bf16_from_double(value * power));
      }
    }
  data.hidden.assign(reinterpret_cast<const uint8_t*>(hidden.data()),
                     reinterpret_cast<const uint8_t*>(hidden.data() + hidden.size()));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < kTopK; ++k) data.set_id(t, k, (t + k * (1 + t % 3)) % kExperts);
  for (float& weight : data.topk_weights) weight = random.below(2) == 0 ? 0.5f : 0.25f;
  return data;
}

class ExactSums : public test::BackendTest {};

TEST_P(ExactSums, LayersHaveTheReferencesBits) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const int64_t tokens : {int64_t{1}, int64_t{9}, int64_t{40}, int64_t{300}}) {
      SCOPED_TRACE(testing::Message() << to_string(format) << ", " << tokens << " tokens");
      const CaseData data = exact_case(format, tokens);
      test::CaseRun reference(kReferenceBackend, data), own(backend(), data);
      ASSERT_TRUE(reference.ok() && own.ok());
      const std::vector<uint8_t> expected = reference.run(data), actual = own.run(data);
      ASSERT_EQ(test::difference(expected, actual, DType::kF32, kHidden), "");
      EXPECT_EQ(own.broken_guard(), -1);
      // All elements differ, so that swapped elements are detected.
      const std::vector<float> values = test::to_floats(expected, DType::kF32);
      EXPECT_GT(std::set<float>(values.begin(), values.end()).size(),
                std::min<size_t>(values.size() / 4, 2000));
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, ExactSums, ::testing::ValuesIn(test::judged_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
