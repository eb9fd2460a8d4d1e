// The values and bias of one block of nvfp4 operands, for every x86 instruction set (SSSE3 and
// SSE4.1 suffice).
//
// Included in the unnamed namespace of nvfp4_moe::internal::cpu, inside a target region.

inline void int8_block_values(const uint8_t* codes, Int8Block& out) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)),
                nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(packed, nibble),
                odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i values = _mm_shuffle_epi8(doubled, _mm_unpacklo_epi8(even, odd));
  const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(12), values);  // 12 (a + b), within 16 bits
  __m128i sum = _mm_madd_epi16(pairs, _mm_set1_epi16(-1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.values), values);
  out.bias = _mm_cvtsi128_si32(sum);
}
