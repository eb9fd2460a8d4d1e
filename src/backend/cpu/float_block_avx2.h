// A block of a panel for the fp32 multiplications of "avx2": byte lookups turn 32 codes at a time
// into bf16 numbers.
//
// Included in place of float_block.h, with the same functions and the same bits. A bf16 number is
// the upper half of its fp32 number and has two bytes: two lookups and an unpack give those of 16
// weights. Eight weights take 2.5 instructions, against six with vpermps, which looks up 32 bits.

// A row has two chains of two registers, and three rows of them are added at a time: one 8-half
// after the other would leave six chains, too few for two multiply-adds a cycle that take four.
[[maybe_unused]] constexpr bool kAlternateHalves = true;

// bf16 E2M1 of 16 rows and k = 0 .. 7. pair[n] has k = 2 n in the lower half of a row's lane and
// k = 2 n + 1 in the upper half.
struct HalfBlock {
  I pair[4];
};

// The same for 8 rows.
inline void bf16_pairs(const uint8_t* codes, __m256i (&pair)[4]) {
  const __m256i upper =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -0x80,
                                                -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
  // bytes 0 and 1 of four rows, then their bytes 2 and 3
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i bytes = _mm256_shuffle_epi8(load256(codes), order);
  for (int n = 0; n < 2; ++n) {  // k = 0 .. 3 are low nibbles, 4 .. 7 are high ones
    const __m256i code = _mm256_and_si256(n == 0 ? bytes : _mm256_srli_epi16(bytes, 4), nibble);
    const __m256i low_bytes = _mm256_shuffle_epi8(lower, code),
                  high_bytes = _mm256_shuffle_epi8(upper, code);
    pair[2 * n] = _mm256_unpacklo_epi8(low_bytes, high_bytes);
    pair[2 * n + 1] = _mm256_unpackhi_epi8(low_bytes, high_bytes);
  }
}
inline HalfBlock load_half_block(const uint8_t* codes) {
  __m256i lo[4], hi[4];
  bf16_pairs(codes, lo);
  bf16_pairs(codes + 32, hi);
  return {{{lo[0], hi[0]}, {lo[1], hi[1]}, {lo[2], hi[2]}, {lo[3], hi[3]}}};
}
inline F weight_of(const HalfBlock& block, int k) {
  const I pair = block.pair[k / 2];
  return from_bits(k % 2 == 0 ? shift_left<16>(pair) : pair & splat(-0x10000));
}

// The values of 16 block scales. A byte shifted by 7 is an fp16 number 2^-8 times as large,
// including subnormals.
inline F block_scales(const uint8_t* scales) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load128(scales)), 7);
  return F{_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
           _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))} *
         splat(256.0f);
}

template <int kCount>
[[gnu::always_inline]] inline void add_block(const uint8_t* codes, const uint8_t* scales,
                                             const float* const* x, int64_t k, F (&sum)[kCount]) {
  // Otherwise GCC keeps the x of a strip's first panel for its second one, on the stack.
  asm volatile("" ::: "memory");
  F chain[2][kCount];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const HalfBlock block = load_half_block(codes + half * 64);
    for (int i = 0; i < kCount; ++i) chain[half][i] = splat(0.0f);
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) {
      const int j = n / 2 + n % 2 * 4;
      const F w = weight_of(block, j);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i)
        chain[half][i] = multiply_add(w, splat(x[i][k + half * 8 + j]), chain[half][i]);
    }
  }
  const F scale = block_scales(scales);
  for (int i = 0; i < kCount; ++i) sum[i] = fma(chain[0][i] + chain[1][i], scale, sum[i]);
}

template <class Weight>
[[gnu::always_inline]] inline void decode_block(const uint8_t* codes, const uint8_t* scales,
                                                const Weight& weight, float* out) {
  const F scale = block_scales(scales);
  for (int half = 0; half < 2; ++half) {
    const HalfBlock block = load_half_block(codes + half * 64);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      store(out + (half * 8 + j) * kPanelRows, weight(weight_of(block, j) * scale));
  }
}
