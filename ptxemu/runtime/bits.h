// PTX's integer and bit-field operations that have no equivalent C++ operator.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime/planted.h"

namespace ptxemu {

using u128 = unsigned __int128;
using i128 = __int128;

template <class T>
inline T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
inline void write(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// ---- shifts: amounts beyond the width shift everything out
#define PTXEMU_SHIFTS(bits)                                                      \
  inline uint##bits##_t shift_left##bits(uint##bits##_t x, uint32_t n) {         \
    if (planted(Fault::shl_wraps)) n %= bits;                                    \
    return n >= bits ? 0 : static_cast<uint##bits##_t>(x << n);                  \
  }                                                                              \
  inline uint##bits##_t shift_right##bits(uint##bits##_t x, uint32_t n) {        \
    return n >= bits ? 0 : x >> n;                                               \
  }                                                                              \
  inline uint##bits##_t shift_right_signed##bits(uint##bits##_t x, uint32_t n) { \
    if (planted(Fault::shr_logical)) return shift_right##bits(x, n);             \
    return static_cast<uint##bits##_t>(static_cast<int##bits##_t>(x) >>          \
                                       (n >= bits ? bits - 1 : n));              \
  }
PTXEMU_SHIFTS(16)
PTXEMU_SHIFTS(32)
PTXEMU_SHIFTS(64)
#undef PTXEMU_SHIFTS

inline uint64_t pair_of_words(uint32_t low, uint32_t high) {
  return low | static_cast<uint64_t>(high) << 32;
}
inline uint32_t funnel_l_wrap(uint32_t a, uint32_t b, uint32_t n) {
  if (planted(Fault::funnel_order))
    return static_cast<uint32_t>((pair_of_words(b, a) << (n & 31)) >> 32);
  return static_cast<uint32_t>((pair_of_words(a, b) << (n & 31)) >> 32);
}
inline uint32_t funnel_r_wrap(uint32_t a, uint32_t b, uint32_t n) {
  return static_cast<uint32_t>(pair_of_words(a, b) >> (n & 31));
}
inline uint32_t funnel_l_clamp(uint32_t a, uint32_t b, uint32_t n) {
  return n >= 32 ? a : funnel_l_wrap(a, b, n);
}
inline uint32_t funnel_r_clamp(uint32_t a, uint32_t b, uint32_t n) {
  return n >= 32 ? b : funnel_r_wrap(a, b, n);
}

// ---- fields: position and length are the low bytes of their operands
template <class T>
inline T low_mask(uint32_t length) {
  return length >= sizeof(T) * 8 ? ~T(0) : static_cast<T>((T(1) << length) - 1);
}
template <class T>
inline T extract_unsigned(T x, uint32_t position, uint32_t length) {
  position &= 255, length &= 255;
  return position >= sizeof(T) * 8 ? T(0) : (x >> position) & low_mask<T>(length);
}
template <class T>
inline T extract_signed(T x, uint32_t position, uint32_t length) {
  position &= 255, length &= 255;
  constexpr uint32_t kBits = sizeof(T) * 8;
  if (length == 0) return 0;
  const uint32_t last = position + length - 1 < kBits ? position + length - 1 : kBits - 1;
  const T field = extract_unsigned(x, position, length);
  if (planted(Fault::bfe_sign) || !(x >> last & 1)) return field;
  const uint32_t width = position >= kBits ? 0 : last - position + 1;
  return field | static_cast<T>(~low_mask<T>(width));
}
inline uint32_t extract_u32(uint32_t x, uint32_t p, uint32_t n) {
  return extract_unsigned(x, p, n);
}
inline uint64_t extract_u64(uint64_t x, uint32_t p, uint32_t n) {
  return extract_unsigned(x, p, n);
}
inline uint32_t extract_s32(uint32_t x, uint32_t p, uint32_t n) { return extract_signed(x, p, n); }
inline uint64_t extract_s64(uint64_t x, uint32_t p, uint32_t n) { return extract_signed(x, p, n); }
template <class T>
inline T insert(T field, T into, uint32_t position, uint32_t length) {
  position &= 255, length &= 255;
  if (planted(Fault::bfi_length) && length) --length;
  if (position >= sizeof(T) * 8) return into;
  const T mask = static_cast<T>(low_mask<T>(length) << position);
  return static_cast<T>((into & ~mask) | ((field << position) & mask));
}
inline uint32_t insert32(uint32_t field, uint32_t into, uint32_t p, uint32_t n) {
  return insert(field, into, p, n);
}
inline uint64_t insert64(uint64_t field, uint64_t into, uint32_t p, uint32_t n) {
  return insert(field, into, p, n);
}
inline uint32_t bit_mask_clamp(uint32_t position, uint32_t length) {
  return position >= 32 ? 0 : low_mask<uint32_t>(length) << position;
}
inline uint32_t bit_mask_wrap(uint32_t position, uint32_t length) {
  return low_mask<uint32_t>(length & 31) << (position & 31);
}

// ---- searches
inline uint32_t leading_zeros32(uint32_t x) {
  return x ? static_cast<uint32_t>(__builtin_clz(x)) : 32;
}
inline uint32_t leading_zeros64(uint64_t x) {
  return x ? static_cast<uint32_t>(__builtin_clzll(x)) : 64;
}
inline uint32_t find_first32(uint32_t x) { return x ? 31 - leading_zeros32(x) : ~0u; }
inline uint32_t find_first64(uint64_t x) { return x ? 63 - leading_zeros64(x) : ~0u; }
inline uint32_t find_first32_shift(uint32_t x) {
  if (planted(Fault::bfind_shiftamt)) return find_first32(x);
  return x ? leading_zeros32(x) : ~0u;
}
inline uint32_t find_first64_shift(uint64_t x) { return x ? leading_zeros64(x) : ~0u; }
inline uint32_t magnitude_bits32(uint32_t x) { return static_cast<int32_t>(x) < 0 ? ~x : x; }
inline uint64_t magnitude_bits64(uint64_t x) { return static_cast<int64_t>(x) < 0 ? ~x : x; }
inline uint32_t reverse32(uint32_t x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
inline uint64_t reverse64(uint64_t x) {
  return pair_of_words(reverse32(static_cast<uint32_t>(x >> 32)),
                       reverse32(static_cast<uint32_t>(x)));
}
// The offset-th set bit from `base` upwards (offset > 0) or downwards (< 0); base itself for 0 if
// it is set.
inline uint32_t find_nth(uint32_t mask, uint32_t base, uint32_t offset_bits) {
  int32_t offset = static_cast<int32_t>(offset_bits);
  const int32_t step = offset < 0 ? -1 : 1;
  if (offset == 0) return base < 32 && (mask >> base & 1) ? base : ~0u;
  for (int64_t at = base; at >= 0 && at < 32; at += step)
    if (mask >> at & 1 && (offset -= step) == 0) return static_cast<uint32_t>(at);
  return ~0u;
}

// ---- bytes and tables
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = pair_of_words(a, b);
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i);
    uint8_t byte = static_cast<uint8_t>(bytes >> (8 * (selector & 7)));
    if (selector & 8 && !planted(Fault::prmt_sign)) byte = byte & 0x80 ? 0xff : 0;
    result |= static_cast<uint32_t>(byte) << (8 * i);
  }
  return result;
}
inline uint32_t permute_f4e(uint32_t a, uint32_t b, uint32_t c) {
  return static_cast<uint32_t>(pair_of_words(a, b) >> (8 * (c & 3)));
}
inline uint32_t permute_b4e(uint32_t a, uint32_t b, uint32_t c) {
  static constexpr uint32_t kSelectors[4] = {0x5670, 0x6701, 0x7012, 0x0123};
  return permute(a, b, kSelectors[c & 3]);
}
inline uint32_t permute_rc8(uint32_t a, uint32_t b, uint32_t c) {
  return permute(a, b, (c & 3) * 0x1111);
}
inline uint32_t permute_ecl(uint32_t a, uint32_t b, uint32_t c) {
  static constexpr uint32_t kSelectors[4] = {0x3210, 0x3211, 0x3222, 0x3333};
  return permute(a, b, kSelectors[c & 3]);
}
inline uint32_t permute_ecr(uint32_t a, uint32_t b, uint32_t c) {
  static constexpr uint32_t kSelectors[4] = {0x0000, 0x1110, 0x2210, 0x3210};
  return permute(a, b, kSelectors[c & 3]);
}
inline uint32_t permute_rc16(uint32_t a, uint32_t b, uint32_t c) {
  return permute(a, b, c & 1 ? 0x3232 : 0x1010);
}
inline uint32_t logic3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t bit = planted(Fault::lop3_order) ? 7 - i : i;
    if (table >> bit & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

// ---- arithmetic
template <class T>
inline T divide(T a, T b) {
  if (b == 0) return planted(Fault::div_by_zero) ? T(0) : T(-1);
  if (std::is_signed<T>::value && b == T(-1))
    return static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(a));
  return static_cast<T>(a / b);
}
template <class T>
inline T remainder_of(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed<T>::value && b == T(-1)) return 0;
  return static_cast<T>(a % b);
}
template <class T>
inline std::make_unsigned_t<T> high_product(std::make_unsigned_t<T> a, std::make_unsigned_t<T> b) {
  using U = std::make_unsigned_t<T>;
  constexpr int kBits = sizeof(T) * 8;
  if (std::is_signed<T>::value && !planted(Fault::mul_hi_unsigned))
    return static_cast<U>(i128(static_cast<T>(a)) * static_cast<T>(b) >> kBits);
  return static_cast<U>(u128(a) * b >> kBits);
}
template <class T>
inline T saturate_integer(i128 x) {
  constexpr bool kSigned = std::is_signed<T>::value;
  constexpr i128 kMost = (i128(1) << (sizeof(T) * 8 - kSigned)) - 1,
                 kLeast = kSigned ? -kMost - 1 : 0;
  return static_cast<T>(x < kLeast ? kLeast : x > kMost ? kMost : x);
}
inline uint32_t saturated_add(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(
      saturate_integer<int32_t>(i128(static_cast<int32_t>(a)) + static_cast<int32_t>(b)));
}
inline uint32_t saturated_sub(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(
      saturate_integer<int32_t>(i128(static_cast<int32_t>(a)) - static_cast<int32_t>(b)));
}
inline uint32_t low24_u(uint32_t x) { return x & 0xffffff; }
inline uint32_t low24_s(uint32_t x) {
  return static_cast<uint32_t>(static_cast<int32_t>(x << 8) >> 8);
}
template <class A, class B>
inline uint32_t dot4(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 32; i += 8)
    sum += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> i)) *
                                 static_cast<int32_t>(static_cast<B>(b >> i)));
  return sum;
}
inline uint16_t low_half(uint32_t x) { return static_cast<uint16_t>(x); }
inline uint16_t high_half(uint32_t x) { return static_cast<uint16_t>(x >> 16); }
template <class V = uint16_t, class F>
inline uint32_t each_u16(uint32_t a, uint32_t b, F of) {
  const auto low = of(static_cast<V>(low_half(a)), static_cast<V>(low_half(b)));
  const auto high = of(static_cast<V>(high_half(a)), static_cast<V>(high_half(b)));
  return static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16;
}
#define PTXEMU_HALVES(name, V, result)                         \
  inline uint32_t name(uint32_t a, uint32_t b) {               \
    return each_u16<V>(a, b, [](V x, V y) { return result; }); \
  }
PTXEMU_HALVES(add_u16x2, uint16_t, x + y)
PTXEMU_HALVES(min_u16x2, uint16_t, x < y ? x : y)
PTXEMU_HALVES(max_u16x2, uint16_t, x > y ? x : y)
PTXEMU_HALVES(min_s16x2, int16_t, x < y ? x : y)
PTXEMU_HALVES(max_s16x2, int16_t, x > y ? x : y)
#undef PTXEMU_HALVES

}  // namespace ptxemu
