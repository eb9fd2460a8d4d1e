// 16 lanes of float and of int32 as four NEON registers: the operations that rows.h uses.
//
// Included inside a target region, in the unnamed namespace of nvfp4_moe::internal::cpu, after the
// headers it needs. vector_avx512.h, vector_avx2.h and vector_portable.h define the same names with
// the same results. Armv8-A is sufficient.

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct M {
  uint32x4_t v[4];  // all ones or all zeros
};

// x 2 chains x 4 registers = 24 accumulators of 32 registers
inline constexpr int kDoubleLanes = 2;  // doubles in a register
inline constexpr int kFloatTileRows = 3;

#define NVFP4_MOE_QUADS _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

inline F load(const float* p) {
  F a;
  NVFP4_MOE_QUADS a.v[i] = vld1q_f32(p + 4 * i);
  return a;
}
inline I load(const int32_t* p) {
  I a;
  NVFP4_MOE_QUADS a.v[i] = vld1q_s32(p + 4 * i);
  return a;
}
inline I load_lanes(const uint8_t* p) {
  I a;
  NVFP4_MOE_QUADS a.v[i] = vreinterpretq_s32_u8(vld1q_u8(p + 16 * i));
  return a;
}
// 16 u16 lanes in order, each times 2^kShift in 32 bits.
template <int kShift>
inline I from_u16(uint16x8_t lo, uint16x8_t hi) {
  return {{vreinterpretq_s32_u32(vshll_n_u16(vget_low_u16(lo), kShift)),
           vreinterpretq_s32_u32(vshll_high_n_u16(lo, kShift)),
           vreinterpretq_s32_u32(vshll_n_u16(vget_low_u16(hi), kShift)),
           vreinterpretq_s32_u32(vshll_high_n_u16(hi, kShift))}};
}
inline I load_bytes(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  return from_u16<0>(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
}
// 16 fp16 numbers in order.
inline F from_fp16(float16x8_t lo, float16x8_t hi) {
  return {{vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo), vcvt_f32_f16(vget_low_f16(hi)),
           vcvt_high_f32_f16(hi)}};
}
inline F load_fp16(const uint16_t* p) {
  return from_fp16(vreinterpretq_f16_u16(vld1q_u16(p)), vreinterpretq_f16_u16(vld1q_u16(p + 8)));
}
inline void store(float* p, F a) { NVFP4_MOE_QUADS vst1q_f32(p + 4 * i, a.v[i]); }
inline void store(int32_t* p, I a) { NVFP4_MOE_QUADS vst1q_s32(p + 4 * i, a.v[i]); }
// The low halves of lanes 0-7 and of lanes 8-15.
inline uint16x8_t low_halves(int32x4_t a, int32x4_t b) {
  return vuzp1q_u16(vreinterpretq_u16_s32(a), vreinterpretq_u16_s32(b));
}
inline uint8x16_t low_bytes(I a) {
  return vuzp1q_u8(vreinterpretq_u8_u16(low_halves(a.v[0], a.v[1])),
                   vreinterpretq_u8_u16(low_halves(a.v[2], a.v[3])));
}
inline void store_u16(uint16_t* p, I a) {
  vst1q_u16(p, low_halves(a.v[0], a.v[1]));
  vst1q_u16(p + 8, low_halves(a.v[2], a.v[3]));
}
inline void store_bytes(uint8_t* p, I a) { vst1q_u8(p, low_bytes(a)); }
inline void store_fp16(uint16_t* p, F a) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.v[0]), a.v[1])));
  vst1q_u16(p + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.v[2]), a.v[3])));
}

inline F splat(float value) {
  F a;
  NVFP4_MOE_QUADS a.v[i] = vdupq_n_f32(value);
  return a;
}
inline I splat(int32_t value) {
  I a;
  NVFP4_MOE_QUADS a.v[i] = vdupq_n_s32(value);
  return a;
}
inline F operator+(F a, F b) {
  NVFP4_MOE_QUADS a.v[i] = vaddq_f32(a.v[i], b.v[i]);
  return a;
}
inline F operator-(F a, F b) {
  NVFP4_MOE_QUADS a.v[i] = vsubq_f32(a.v[i], b.v[i]);
  return a;
}
inline F operator*(F a, F b) {
  NVFP4_MOE_QUADS a.v[i] = vmulq_f32(a.v[i], b.v[i]);
  return a;
}
inline F operator/(F a, F b) {
  NVFP4_MOE_QUADS a.v[i] = vdivq_f32(a.v[i], b.v[i]);
  return a;
}
inline F fma(F a, F b, F c) {
  NVFP4_MOE_QUADS c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
  return c;
}
inline F multiply_add(F a, F b, F c) { return fma(a, b, c); }  // for exact a * b
inline I bits(F a) {
  I b;
  NVFP4_MOE_QUADS b.v[i] = vreinterpretq_s32_f32(a.v[i]);
  return b;
}
inline F from_bits(I a) {
  F b;
  NVFP4_MOE_QUADS b.v[i] = vreinterpretq_f32_s32(a.v[i]);
  return b;
}
inline F load_bf16(const uint16_t* p) {
  return from_bits(from_u16<16>(vld1q_u16(p), vld1q_u16(p + 8)));
}
inline F to_float(I a) {
  F b;
  NVFP4_MOE_QUADS b.v[i] = vcvtq_f32_s32(a.v[i]);
  return b;
}
inline I operator+(I a, I b) {
  NVFP4_MOE_QUADS a.v[i] = vaddq_s32(a.v[i], b.v[i]);
  return a;
}
inline I operator-(I a, I b) {
  NVFP4_MOE_QUADS a.v[i] = vsubq_s32(a.v[i], b.v[i]);
  return a;
}
inline I operator&(I a, I b) {
  NVFP4_MOE_QUADS a.v[i] = vandq_s32(a.v[i], b.v[i]);
  return a;
}
inline I operator|(I a, I b) {
  NVFP4_MOE_QUADS a.v[i] = vorrq_s32(a.v[i], b.v[i]);
  return a;
}
template <int kBits>
inline I shift_left(I a) {
  NVFP4_MOE_QUADS a.v[i] = vshlq_n_s32(a.v[i], kBits);
  return a;
}
template <int kBits>
inline I shift_right(I a) {  // shifts in zeros
  NVFP4_MOE_QUADS a.v[i] = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), kBits));
  return a;
}
template <int kBits>
inline I shift_right_signed(I a) {
  NVFP4_MOE_QUADS a.v[i] = vshrq_n_s32(a.v[i], kBits);
  return a;
}
inline I max(I a, I b) {
  NVFP4_MOE_QUADS a.v[i] = vmaxq_s32(a.v[i], b.v[i]);
  return a;
}
inline int32_t max_lane(I a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}

// Comparisons with NaN are false.
inline M operator>(F a, F b) {
  M m;
  NVFP4_MOE_QUADS m.v[i] = vcgtq_f32(a.v[i], b.v[i]);
  return m;
}
inline M operator>=(F a, F b) {
  M m;
  NVFP4_MOE_QUADS m.v[i] = vcgeq_f32(a.v[i], b.v[i]);
  return m;
}
inline M operator>(I a, I b) {
  M m;
  NVFP4_MOE_QUADS m.v[i] = vcgtq_s32(a.v[i], b.v[i]);
  return m;
}
inline F select(M m, F yes, F no) {
  NVFP4_MOE_QUADS yes.v[i] = vbslq_f32(m.v[i], yes.v[i], no.v[i]);
  return yes;
}
inline I select(M m, I yes, I no) {
  NVFP4_MOE_QUADS yes.v[i] = vbslq_s32(m.v[i], yes.v[i], no.v[i]);
  return yes;
}
inline I plus_one(M m, I a) {
  NVFP4_MOE_QUADS a.v[i] = vsubq_s32(a.v[i], vreinterpretq_s32_u32(m.v[i]));
  return a;
}
inline uint32_t lanes_of(M m) {  // bit i: lane i
  const uint32_t first[4] = {1, 2, 4, 8};
  const uint32x4_t bit = vld1q_u32(first);
  uint32x4_t set = vandq_u32(m.v[0], bit);
  set = vorrq_u32(set, vandq_u32(m.v[1], vshlq_n_u32(bit, 4)));
  set = vorrq_u32(set, vandq_u32(m.v[2], vshlq_n_u32(bit, 8)));
  set = vorrq_u32(set, vandq_u32(m.v[3], vshlq_n_u32(bit, 12)));
  return vaddvq_u32(set);
}

// 16 codes below 16 as 8 bytes, the even element low.
inline void store_codes(uint8_t* p, I a) {
  const uint16x8_t pairs = vreinterpretq_u16_u8(low_bytes(a));
  vst1_u8(p, vmovn_u16(vsraq_n_u16(pairs, pairs, 4)));
}

// 2a of each E2M1 code, as bytes.
inline int8x16_t doubled_table() {
  const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return vld1q_s8(doubled);
}
// The E2M1 value of each lane's low four bits; higher bits are ignored. -0 becomes 0, which makes
// no difference in a sum that starts from 0. The lookup leaves 2a in the lowest byte and, as for
// code 0, 0 in the others.
inline F e2m1(I a) {
  const int8x16_t table = doubled_table();
  F b;
  NVFP4_MOE_QUADS {
    const int8x16_t twice =
        vqtbl1q_s8(table, vreinterpretq_u8_s32(vandq_s32(a.v[i], vdupq_n_s32(15))));
    b.v[i] = vcvtq_n_f32_s32(vshlq_n_s32(vreinterpretq_s32_s8(twice), 24), 25);
  }
  return b;
}

#undef NVFP4_MOE_QUADS
