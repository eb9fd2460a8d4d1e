// 16 lanes of float and of int32 as AVX-512 registers: the operations that rows.h uses.
//
// Included inside a target region, in the unnamed namespace of nvfp4_moe::internal::cpu, after the
// headers it needs. vector_avx2.h and vector_portable.h define the same names with the same
// results.

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

inline constexpr int kDoubleLanes = 8;    // doubles in a register
inline constexpr int kFloatTileRows = 8;  // x 2 chains = 16 accumulators of 32 registers

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline I load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline I load_lanes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline I load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F load_bf16(const uint16_t* p) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F load_fp16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline void store_bytes(uint8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline void store_fp16(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

inline F splat(float a) { return {_mm512_set1_ps(a)}; }
inline I splat(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F multiply_add(F a, F b, F c) { return fma(a, b, c); }  // for exact a * b
inline I bits(F a) { return {_mm512_castps_si512(a.v)}; }
inline F from_bits(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits>
inline I shift_left(I a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline I shift_right(I a) {  // shifts in zeros
  return {_mm512_srli_epi32(a.v, kBits)};
}
template <int kBits>
inline I shift_right_signed(I a) {
  return {_mm512_srai_epi32(a.v, kBits)};
}
inline I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int32_t max_lane(I a) { return _mm512_reduce_max_epi32(a.v); }

// Comparisons with NaN are false.
inline M operator>(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline M operator>=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline M operator>(I a, I b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
inline F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
inline I select(M m, I yes, I no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }
inline I plus_one(M m, I a) { return {_mm512_mask_add_epi32(a.v, m.v, a.v, _mm512_set1_epi32(1))}; }
inline uint32_t lanes_of(M m) { return m.v; }  // bit i: lane i

// The low halves of 16 lanes below 2^16.
inline void store_u16(uint16_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
// 16 codes below 16 as 8 bytes, the even element low.
inline void store_codes(uint8_t* p, I a) {
  const __m128i pairs = _mm_maddubs_epi16(_mm512_cvtepi32_epi8(a.v), _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
}
// The E2M1 value of each lane's low four bits; higher bits are ignored.
inline F e2m1(I a) {
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return {_mm512_permutexvar_ps(a.v, table)};
}
