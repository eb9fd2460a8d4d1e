// Single instructions of 12.x: one mma.sync with block scales.
#include "acceptance/ladder/instructions.cuh"
#include "backend/cuda/ptx/mma_block_scale.cuh"
#include "core/float_formats.h"

namespace nvfp4_moe::internal::ladder {
namespace {

constexpr int kM = 16, kN = 8, kK = 64;

// from: for each lane four words of a, two of b, a word of scales of each. to: d (16, 8).
__global__ void mma_kernel(const uint32_t* from, uint32_t* to) {
  const uint32_t* const own = from + threadIdx.x * 8;
  float d[4] = {};
  ptx::mma_fp4(d, make_uint4(own[0], own[1], own[2], own[3]), own[4], own[5], own[6], own[7]);
  const uint32_t r = threadIdx.x / 4, q = threadIdx.x % 4;
  for (uint32_t i = 0; i < 4; ++i) to[(r + i / 2 * 8) * kN + 2 * q + i % 2] = __float_as_uint(d[i]);
}

// Rows of 64 codes, eight a word, and a word of four scales.
struct Operand {
  Operand(int rows, Random& random) : words(static_cast<size_t>(rows) * 8, 0), scales(rows, 0) {
    for (int row = 0; row < rows; ++row)
      for (int k = 0; k < kK; ++k) {
        if (k % 16 == 0)  // 1/2, 1, 2
          scales[static_cast<size_t>(row)] |= static_cast<uint32_t>(0x30 + 8 * random.below(3))
                                              << (k / 16 * 8);
        const auto code = static_cast<uint8_t>(random.below(16));
        words[static_cast<size_t>(row * 8 + k / 8)] |= uint32_t{code} << (k % 8 * 4);
        const auto scale =
            static_cast<uint8_t>(scales[static_cast<size_t>(row)] >> (k / 16 * 8) & 0xFF);
        values.push_back(e2m1_to_float(code) * e4m3_to_float(scale));
      }
  }
  uint32_t word(int row, int i) const { return words[static_cast<size_t>(row * 8 + i)]; }
  Words words, scales;
  std::vector<float> values;
};

std::string mma_fp4() {
  Random random(4);
  const Operand a(kM, random), b(kN, random);
  Words from;
  for (int lane = 0; lane < 32; ++lane) {
    const int r = lane / 4, q = lane % 4;
    const uint32_t scales_a = q == 0   ? a.scales[static_cast<size_t>(r)]
                              : q == 1 ? a.scales[static_cast<size_t>(r + 8)]
                                       : 0;
    from.insert(from.end(), {a.word(r, q), a.word(r + 8, q), a.word(r, 4 + q), a.word(r + 8, 4 + q),
                             b.word(r, q), b.word(r, 4 + q), scales_a,
                             q == 0 ? b.scales[static_cast<size_t>(r)] : 0});
  }
  return compare(mma_kernel, 32, 0, from, product(a.values, b.values, kM, kN, kK), element_of(kN));
}

}  // namespace

std::vector<Instruction> sm120_instructions() { return with_common({{"mma-fp4", mma_fp4}}); }

}  // namespace nvfp4_moe::internal::ladder
