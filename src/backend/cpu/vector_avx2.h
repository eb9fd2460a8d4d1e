// 16 lanes of float and of int32 as pairs of AVX2 registers: the operations that rows.h uses.
//
// Included inside a target region, in the unnamed namespace of nvfp4_moe::internal::cpu, after the
// headers it needs. vector_avx512.h and vector_portable.h define the same names with the same
// results.

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};
struct M {
  __m256i lo, hi;  // all ones or all zeros
};

// x 2 chains x 2 registers = 12 accumulators of 16 registers
inline constexpr int kDoubleLanes = 4;  // doubles in a register
inline constexpr int kFloatTileRows = 3;

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store256(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline I load(const int32_t* p) { return {load256(p), load256(p + 8)}; }
inline I load_lanes(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
inline I load_bytes(const uint8_t* p) {
  const __m128i bytes = load128(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline F load_bf16(const uint16_t* p) {
  const __m256i lo = _mm256_cvtepu16_epi32(load128(p)), hi = _mm256_cvtepu16_epi32(load128(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
inline F load_fp16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
inline void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(int32_t* p, I a) {
  store256(p, a.lo);
  store256(p + 8, a.hi);
}
// 16 lanes below 2^16, in order.
inline __m256i narrow_u16(I a) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xD8);
}
inline __m128i narrow_u8(I a) {
  const __m256i words = narrow_u16(a);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store_u16(uint16_t* p, I a) { store256(p, narrow_u16(a)); }
inline void store_bytes(uint8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_u8(a));
}
inline void store_fp16(uint16_t* p, F a) {
  const __m128i lo = _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT);
  const __m128i hi = _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT);
  store256(p, _mm256_set_m128i(hi, lo));
}

inline F splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline I splat(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F multiply_add(F a, F b, F c) { return fma(a, b, c); }  // for exact a * b
inline I bits(F a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F from_bits(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I operator+(I a, I b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline I operator-(I a, I b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
inline I operator&(I a, I b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline I operator|(I a, I b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int kBits>
inline I shift_left(I a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
inline I shift_right(I a) {  // shifts in zeros
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
template <int kBits>
inline I shift_right_signed(I a) {
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
inline I max(I a, I b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline int32_t max_lane(I a) {
  const __m256i vec8 = _mm256_max_epi32(a.lo, a.hi);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(vec8), _mm256_extracti128_si256(vec8, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

// Comparisons with NaN are false.
inline M operator>(F a, F b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
inline M operator>=(F a, F b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))};
}
inline M operator>(I a, I b) {
  return {_mm256_cmpgt_epi32(a.lo, b.lo), _mm256_cmpgt_epi32(a.hi, b.hi)};
}
inline I select(M m, I yes, I no) {
  return {_mm256_blendv_epi8(no.lo, yes.lo, m.lo), _mm256_blendv_epi8(no.hi, yes.hi, m.hi)};
}
inline F select(M m, F yes, F no) { return from_bits(select(m, bits(yes), bits(no))); }
inline I plus_one(M m, I a) { return {_mm256_sub_epi32(a.lo, m.lo), _mm256_sub_epi32(a.hi, m.hi)}; }
inline uint32_t lanes_of(M m) {  // bit i: lane i
  const int lo = _mm256_movemask_ps(_mm256_castsi256_ps(m.lo)),
            hi = _mm256_movemask_ps(_mm256_castsi256_ps(m.hi));
  return static_cast<uint32_t>(lo | hi << 8);
}

// 16 codes below 16 as 8 bytes, the even element low.
inline void store_codes(uint8_t* p, I a) {
  const __m128i pairs = _mm_maddubs_epi16(narrow_u8(a), _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
}
// The E2M1 value of each lane's low four bits; higher bits are ignored.
inline F e2m1(I a) {
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const I sign = shift_left<28>(a & splat(8));
  const F magnitude{_mm256_permutevar8x32_ps(magnitudes, a.lo),
                    _mm256_permutevar8x32_ps(magnitudes, a.hi)};
  return from_bits(bits(magnitude) | sign);
}
