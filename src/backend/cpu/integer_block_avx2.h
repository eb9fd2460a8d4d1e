// W4A16 of one row for "avx2": nearly every block is multiplied as integers, with the bits of fp32.
//
// Included after the 8-bit multiplication of avx2.cpp, whose functions it uses, and after
// float_small_batch.h. vpmaddubsw multiplies the bytes of the integers, which takes half of the
// time of fp32. Blocks that are not integers (integer_block.h) are multiplied in fp32.

inline int32_t sum_of(__m256i a) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline int32_t sum_of(I a) { return sum_of(_mm256_add_epi32(a.lo, a.hi)); }
// The lower or the upper eight lanes added up, whichever is more.
inline int32_t larger_half(I a) { return std::max(sum_of(a.lo), sum_of(a.hi)); }
inline I magnitudes(I a) { return {_mm256_abs_epi32(a.lo), _mm256_abs_epi32(a.hi)}; }
inline uint32_t or_of(I a) {
  const __m256i vec8 = _mm256_or_si256(a.lo, a.hi);
  __m128i four = _mm_or_si128(_mm256_castsi256_si128(vec8), _mm256_extracti128_si256(vec8, 1));
  four = _mm_or_si128(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<uint32_t>(
      _mm_cvtsi128_si32(_mm_or_si128(four, _mm_shuffle_epi32(four, 0xB1))));
}
inline I shift_right_signed(I a, int count) {
  const __m128i bits = _mm_cvtsi32_si128(count);
  return {_mm256_sra_epi32(a.lo, bits), _mm256_sra_epi32(a.hi, bits)};
}

#include "backend/cpu/integer_block.h"

// sum[p] + block b of panel p's chunk times the activations' block, whose count is kBytes. Panels
// and halves take turns, as in add_small_batch.
template <int kBytes, int kPanels>
inline void add_integer_block(const uint8_t* const (&chunks)[kPanels], int64_t b,
                              const IntegerBlock& x, F (&sum)[kPanels][1]) {
  __m256i pairs[kPanels][kBytes][2];  // two 16-bit parts a row of weights
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i codes = load_codes(chunks[p], b, v, h);
        const __m256i w0 = low_weights(codes), w1 = high_weights(codes);
#pragma GCC unroll 3
        for (int n = 0; n < kBytes; ++n) {
          const int8_t* bytes = x.bytes[n] + 8 * v;
          const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(w0, broadcast4(bytes)),
                                                _mm256_maddubs_epi16(w1, broadcast4(bytes + 4)));
          pairs[p][n][h] = v == 0 ? both : _mm256_add_epi16(pairs[p][n][h], both);
        }
      }
    }
  }
  const __m256i one = _mm256_set1_epi16(1), two8 = _mm256_set1_epi16(256);
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
    const auto total = [&](int h) {
      __m256i upper = _mm256_madd_epi16(pairs[p][kBytes - 1][h], two8);
      if constexpr (kBytes == 3)
        upper =
            _mm256_slli_epi32(_mm256_add_epi32(upper, _mm256_madd_epi16(pairs[p][1][h], one)), 8);
      const __m256i low = _mm256_madd_epi16(pairs[p][0][h], one);
      return _mm256_add_epi32(_mm256_add_epi32(upper, low), _mm256_set1_epi32(x.bias));
    };
    const F scale{small_scales(chunks[p], b, 0), small_scales(chunks[p], b, 1)};
    sum[p][0] = fma(to_float(I{total(0), total(1)}) * splat(x.step), scale, sum[p][0]);
  }
}

// acc: (kPanels * 16).
template <int kPanels>
void multiply_bf16_row(const Strip& strip, const OperandRows& row, float* acc) {
  const float* x = reinterpret_cast<const float*>(row.rows[0]);  // (chunks * 64)
  const auto* blocks =                                           // (chunks * 4)
      reinterpret_cast<const IntegerBlock*>(row.rows[0] + strip.chunks * kFloatChunkBytes);
  F sum[kPanels][1];
  for (auto& panel : sum) panel[0] = splat(0.0f);
  for (int64_t c = 0; c < strip.chunks; ++c) {
    const Chunks<kPanels> chunks(strip, c);
#pragma GCC unroll 1
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const int64_t index = c * kBlocksPerChunk + b;
      const IntegerBlock& block = blocks[index];
      if (block.count == 2) {
        add_integer_block<2>(chunks.bytes, b, block, sum);
      } else if (block.count == 3) {
        add_integer_block<3>(chunks.bytes, b, block, sum);
      } else {
        for (int p = 0; p < kPanels; ++p)
          add_block(chunks.bytes[p] + b * kBlockCodesBytes,
                    chunks.bytes[p] + kChunkScalesOffset + b * kPanelRows, &x, index * kBlockElems,
                    sum[p]);
      }
    }
  }
  for (int p = 0; p < kPanels; ++p) store(acc + p * kPanelRows, sum[p][0]);
}

void multiply_bf16(const Strip& strip, const OperandRows& rows, float* acc) {
  if (rows.count != 1 || !rows.for_single_row || rows.same_bits || rows.k < kChunkK)
    return multiply_fp32(strip, rows, acc);
  if (strip.panels == 1) return multiply_bf16_row<1>(strip, rows, acc);
  multiply_bf16_row<2>(strip, rows, acc);
}
