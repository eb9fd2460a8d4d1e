#include "support/exact_case.h"

#include "core/float_formats.h"
#include "core/random.h"
#include "support/sizes.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr uint8_t kCodeOf1 = 2, kCodeOf3 = 5, kSign = 8;

void set_code(Nvfp4Buffers& matrix, int64_t cols, int64_t row, int64_t col, uint8_t code) {
  uint8_t& pair = matrix.codes[static_cast<size_t>((row * cols + col) / 2)];
  pair = col % 2 == 0 ? static_cast<uint8_t>((pair & 0xF0) | code)
                      : static_cast<uint8_t>((pair & 0x0F) | code << 4);
}

// (rows, cols) of pairs (w, -w) and scales of 1 or 2. put_pair later sets its block's scale to
// 1.
void fill_with_pairs(Nvfp4Buffers& matrix, int64_t rows, int64_t cols, Random& random) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; col += 2) {
      const auto code = static_cast<uint8_t>(random.below(16));
      set_code(matrix, cols, row, col, code);
      set_code(matrix, cols, row, col + 1, code ^ kSign);
    }
  for (uint8_t& scale : matrix.block_scales)
    scale = static_cast<uint8_t>(0x38 + 8 * random.below(2));
}

void put_pair(Nvfp4Buffers& matrix, int64_t cols, int64_t row, int64_t pair, uint8_t code) {
  for (int64_t col : {2 * pair, 2 * pair + 1}) set_code(matrix, cols, row, col, code);
  matrix.block_scales[static_cast<size_t>((row * cols + 2 * pair) / 16)] = 0x38;  // 1
}

}  // namespace

CaseData exact_case(const ExactSizes& sizes, ActivationFormat format, int64_t tokens,
                    bool batch_invariant) {
  Case spec;
  spec.options = sizes_of(sizes.experts, sizes.top_k, sizes.hidden, sizes.intermediate);
  spec.options.batch_invariant = batch_invariant;
  spec.options.activation_format = format;
  spec.options.row_format = RowFormat::kFp32;
  spec.range = {0, sizes.experts};
  spec.tokens = tokens;
  spec.out_dtype = DType::kF32;
  CaseData data = *make_case(spec);
  Random random(static_cast<uint64_t>(tokens));
  for (int64_t e = 0; e < sizes.experts; ++e) {
    ExpertBuffers& expert = data.experts[static_cast<size_t>(e)];
    fill_with_pairs(expert.gate, sizes.intermediate, sizes.hidden, random);
    fill_with_pairs(expert.up, sizes.intermediate, sizes.hidden, random);
    for (int64_t row = 0; row < sizes.intermediate; ++row) {
      put_pair(expert.gate, sizes.hidden, row, 0,
               kCodeOf3);  // 2 x 3 x the 6 of every token's first two columns
      put_pair(expert.up, sizes.hidden, row, 1 + row % (sizes.hidden / 2 - 1), kCodeOf1);
    }
    for (uint8_t& codes : expert.down.codes) codes = static_cast<uint8_t>(random.below(256));
    for (uint8_t& scale : expert.down.block_scales)
      scale = static_cast<uint8_t>(0x38 + 8 * random.below(2));
    const float power = static_cast<float>(1 + e % 2);
    expert.scales = data.tensor_scales[static_cast<size_t>(e)] = {power, 0.5f, 0.25f * power};
  }
  std::vector<uint16_t> hidden;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t block = 0; block < sizes.hidden / 16; ++block) {
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
    for (int64_t k = 0; k < sizes.top_k; ++k)
      data.set_id(t, k, (t + k * (1 + t % 3)) % sizes.experts);
  for (float& weight : data.topk_weights) weight = random.below(2) == 0 ? 0.5f : 0.25f;
  return data;
}

}  // namespace nvfp4_moe::internal::test
