// 16 lanes of float and of int32 as plain arrays: the operations that rows.h uses, for any machine.
//
// Included in the unnamed namespace of nvfp4_moe::internal::cpu, after the headers it needs.
// vector_avx512.h and vector_avx2.h define the same names with the same results. Compilers turn the
// loops into the vector instructions that they have.

struct F {
  float v[16];
};
struct I {
  uint32_t v[16];  // unsigned, since additions may wrap
};
struct M {
  bool v[16];
};

inline constexpr int kDoubleLanes = 2;  // doubles in a register
inline constexpr int kFloatTileRows = 2;

#define NVFP4_MOE_LANES for (int i = 0; i < 16; ++i)

inline F load(const float* p) {
  F a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline I load(const int32_t* p) {
  I a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline I load_lanes(const uint8_t* p) {
  I a;
  NVFP4_MOE_LANES a.v[i] =
      static_cast<uint32_t>(p[4 * i] | p[4 * i + 1] << 8 | p[4 * i + 2] << 16) |
      static_cast<uint32_t>(p[4 * i + 3]) << 24;
  return a;
}
inline I load_bytes(const uint8_t* p) {
  I a;
  NVFP4_MOE_LANES a.v[i] = p[i];
  return a;
}
inline F load_bf16(const uint16_t* p) {
  F a;
  NVFP4_MOE_LANES a.v[i] = bf16_to_float(p[i]);
  return a;
}
inline F load_fp16(const uint16_t* p) {
  F a;
  NVFP4_MOE_LANES a.v[i] = fp16_to_float(p[i]);
  return a;
}
inline void store(float* p, const F& a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(int32_t* p, const I& a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_u16(uint16_t* p, const I& a) {
  NVFP4_MOE_LANES p[i] = static_cast<uint16_t>(a.v[i]);
}
inline void store_bytes(uint8_t* p, const I& a) {
  NVFP4_MOE_LANES p[i] = static_cast<uint8_t>(a.v[i]);
}
inline void store_fp16(uint16_t* p, const F& a) { NVFP4_MOE_LANES p[i] = fp16_from_float(a.v[i]); }

inline F splat(float value) {
  F a;
  NVFP4_MOE_LANES a.v[i] = value;
  return a;
}
inline I splat(int32_t value) {
  I a;
  NVFP4_MOE_LANES a.v[i] = static_cast<uint32_t>(value);
  return a;
}
inline F operator+(F a, const F& b) {
  NVFP4_MOE_LANES a.v[i] += b.v[i];
  return a;
}
inline F operator-(F a, const F& b) {
  NVFP4_MOE_LANES a.v[i] -= b.v[i];
  return a;
}
inline F operator*(F a, const F& b) {
  NVFP4_MOE_LANES a.v[i] *= b.v[i];
  return a;
}
inline F operator/(F a, const F& b) {
  NVFP4_MOE_LANES a.v[i] /= b.v[i];
  return a;
}
inline F fma(F a, const F& b, const F& c) {
  NVFP4_MOE_LANES a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return a;
}
// For exact a * b, where it equals fma, which is slow without an instruction.
inline F multiply_add(const F& a, const F& b, F c) {
  NVFP4_MOE_LANES c.v[i] += a.v[i] * b.v[i];
  return c;
}
inline I bits(const F& a) {
  I b;
  std::memcpy(b.v, a.v, sizeof b.v);
  return b;
}
inline F from_bits(const I& a) {
  F b;
  std::memcpy(b.v, a.v, sizeof b.v);
  return b;
}
inline F to_float(const I& a) {
  F b;
  NVFP4_MOE_LANES b.v[i] = static_cast<float>(static_cast<int32_t>(a.v[i]));
  return b;
}
inline I operator+(I a, const I& b) {
  NVFP4_MOE_LANES a.v[i] += b.v[i];
  return a;
}
inline I operator-(I a, const I& b) {
  NVFP4_MOE_LANES a.v[i] -= b.v[i];
  return a;
}
inline I operator&(I a, const I& b) {
  NVFP4_MOE_LANES a.v[i] &= b.v[i];
  return a;
}
inline I operator|(I a, const I& b) {
  NVFP4_MOE_LANES a.v[i] |= b.v[i];
  return a;
}
template <int kBits>
inline I shift_left(I a) {
  NVFP4_MOE_LANES a.v[i] <<= kBits;
  return a;
}
template <int kBits>
inline I shift_right(I a) {  // shifts in zeros
  NVFP4_MOE_LANES a.v[i] >>= kBits;
  return a;
}
template <int kBits>
inline I shift_right_signed(I a) {
  NVFP4_MOE_LANES a.v[i] = static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> kBits);
  return a;
}
inline I max(I a, const I& b) {
  NVFP4_MOE_LANES if (static_cast<int32_t>(a.v[i]) < static_cast<int32_t>(b.v[i])) a.v[i] = b.v[i];
  return a;
}
inline int32_t max_lane(const I& a) {
  int32_t largest = static_cast<int32_t>(a.v[0]);
  NVFP4_MOE_LANES largest = std::max(largest, static_cast<int32_t>(a.v[i]));
  return largest;
}

// Comparisons with NaN are false.
inline M operator>(const F& a, const F& b) {
  M m;
  NVFP4_MOE_LANES m.v[i] = a.v[i] > b.v[i];
  return m;
}
inline M operator>=(const F& a, const F& b) {
  M m;
  NVFP4_MOE_LANES m.v[i] = a.v[i] >= b.v[i];
  return m;
}
inline M operator>(const I& a, const I& b) {
  M m;
  NVFP4_MOE_LANES m.v[i] = static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]);
  return m;
}
inline F select(const M& m, F yes, const F& no) {
  NVFP4_MOE_LANES if (!m.v[i]) yes.v[i] = no.v[i];
  return yes;
}
inline I select(const M& m, I yes, const I& no) {
  NVFP4_MOE_LANES if (!m.v[i]) yes.v[i] = no.v[i];
  return yes;
}
inline I plus_one(const M& m, I a) {
  NVFP4_MOE_LANES a.v[i] += m.v[i] ? 1 : 0;
  return a;
}
inline uint32_t lanes_of(const M& m) {  // bit i: lane i
  uint32_t lanes = 0;
  NVFP4_MOE_LANES lanes |= static_cast<uint32_t>(m.v[i]) << i;
  return lanes;
}

// 16 codes below 16 as 8 bytes, the even element low.
inline void store_codes(uint8_t* p, const I& a) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<uint8_t>(a.v[2 * i] | a.v[2 * i + 1] << 4);
}
// The E2M1 value of each lane's low four bits; higher bits are ignored.
inline F e2m1(const I& a) {
  F b;
  NVFP4_MOE_LANES b.v[i] = e2m1_to_float(static_cast<uint8_t>(a.v[i] & 15));
  return b;
}

#undef NVFP4_MOE_LANES
