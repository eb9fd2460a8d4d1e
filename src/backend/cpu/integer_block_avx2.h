// W4A16 of one row for "avx2": nearly every block is multiplied as integers, with the bits of fp32.
//
// Included after the 8-bit multiplication of avx2.cpp, whose functions it uses, and after
// float_small_batch.h, whose order of additions it reproduces. The activations of a block are
// integers times one power of two, the step. If those of each 8-half add up to less than 2^24 / 12
// in magnitude, fp32 rounds nothing within a chain: every product with a weight 2w and every
// partial result is an integer below 2^24. Then their order does not matter, and only adding the
// two chains rounds, as converting that integer does. vpmaddubsw multiplies the bytes of the
// integers, which takes half of the time of fp32. Other blocks are multiplied in fp32.

// A block of 16 activations: x = (bytes[0] + 2^8 bytes[1] + 2^16 bytes[2]) * step * 2^-7.
struct IntegerBlock {
  int8_t bytes[3][16];
  int32_t count;  // bytes to multiply by, 2 or 3; or 0, if fp32 has to multiply the block
  int32_t bias;   // -12 times the sum of the integers, for weights 2w + 12
  float step;     // a power of two; it also holds the 2^8 of small_scales and the 1/2 of 2w
};

constexpr int64_t kIntegerChunkBytes = kBlocksPerChunk * static_cast<int64_t>(sizeof(IntegerBlock));

inline int32_t sum_of(__m256i a) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline uint32_t or_of(I a) {
  const __m256i vec8 = _mm256_or_si256(a.lo, a.hi);
  __m128i four = _mm_or_si128(_mm256_castsi256_si128(vec8), _mm256_extracti128_si256(vec8, 1));
  four = _mm_or_si128(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<uint32_t>(
      _mm_cvtsi128_si32(_mm_or_si128(four, _mm_shuffle_epi32(four, 0xB1))));
}
inline I low_byte(I a) { return shift_right_signed<24>(shift_left<24>(a)); }

// x: (16).
inline void integer_block(const float* x, IntegerBlock& block) {
  constexpr int kBits = 21;  // larger ones exceed kMostSum
  block = {};
  const F values = load(x);
  const int32_t top = max_lane(bits(values) & splat(0x7F800000));  // the largest power of two
  // Far from 2^-126 and 2^127, so that every step and every result is a normal number.
  if (top < (127 - 64) << 23 || top > (127 + 64) << 23) return;
  const float step = std::bit_cast<float>(top - ((kBits - 1) << 23));
  const F scaled = values * splat(1.0f / step);
  I integers = bits(scaled + splat(0x1.8p23f)) - splat(0x4B400000);
  const F rounded = to_float(integers);
  if ((lanes_of(rounded > scaled) | lanes_of(scaled > rounded)) != 0) return;
  const int zeros = std::countr_zero(or_of(integers));
  const __m128i shift = _mm_cvtsi32_si128(zeros);
  integers = {_mm256_sra_epi32(integers.lo, shift), _mm256_sra_epi32(integers.hi, shift)};
  constexpr int32_t kMostSum = ((1 << 24) - 1) / 12;
  if (sum_of(_mm256_abs_epi32(integers.lo)) > kMostSum ||
      sum_of(_mm256_abs_epi32(integers.hi)) > kMostSum)
    return;

  const I low = low_byte(integers), upper = shift_right_signed<8>(integers - low);
  const I middle = low_byte(upper), high = shift_right_signed<8>(upper - middle);
  const I parts[3] = {low, middle, high};
  for (int n = 0; n < 3; ++n) {
    uint8_t bytes[kLanes];
    store_bytes(bytes, parts[n] & splat(0xFF));
    std::memcpy(block.bytes[n], bytes, sizeof bytes);
  }
  block.count = or_of(high) == 0 ? 2 : 3;
  block.bias = -12 * sum_of(_mm256_add_epi32(integers.lo, integers.hi));
  block.step = step * std::bit_cast<float>((127 + 7 + zeros) << 23);
}

// Writes the blocks of a row of fp32_operands, after it: row has chunks_of(k) * 64 floats,
// then a block for each 16 of them.
void integer_blocks_of_row(int64_t k, std::byte* row) {
  const float* values = reinterpret_cast<const float*>(row);
  auto* blocks = reinterpret_cast<IntegerBlock*>(row + chunks_of(k) * kFloatChunkBytes);
  const int64_t count = chunks_of(k) * kBlocksPerChunk;
  int64_t two_bytes = 0;
  for (int64_t b = 0; b < count; ++b) {
    integer_block(values + b * kBlockElems, blocks[b]);
    two_bytes += blocks[b].count == 2 ? 1 : 0;
  }
  // If two and three bytes change often, mispredicted branches cost more than a third byte that is
  // 0.
  if (4 * two_bytes >= 3 * count) return;
  for (int64_t b = 0; b < count; ++b)
    if (blocks[b].count == 2) blocks[b].count = 3;
}

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
    const uint8_t* chunks[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      prefetch_ahead(strip, p, c);
      chunks[p] = strip.bytes + (p * strip.chunks + c) * kChunkBytes;
    }
#pragma GCC unroll 1
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const int64_t index = c * kBlocksPerChunk + b;
      const IntegerBlock& block = blocks[index];
      if (block.count == 2) {
        add_integer_block<2>(chunks, b, block, sum);
      } else if (block.count == 3) {
        add_integer_block<3>(chunks, b, block, sum);
      } else {
        for (int p = 0; p < kPanels; ++p)
          add_block(chunks[p] + b * kBlockCodesBytes,
                    chunks[p] + kChunkScalesOffset + b * kPanelRows, &x, index * kBlockElems,
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
