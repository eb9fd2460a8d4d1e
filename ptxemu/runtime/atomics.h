// Read-modify-write operations. Fibers do not interrupt each other, so a plain sequence is atomic.
#pragma once

#include "runtime/formats.h"

namespace ptxemu {

template <class T, class F>
inline std::make_unsigned_t<T> update(uint8_t* at, F of) {
  const T old = read<T>(at);
  write<T>(at, of(old));
  return static_cast<std::make_unsigned_t<T>>(old);
}
template <class T>
inline auto atomic_add(uint8_t* at, std::make_unsigned_t<T> value) {
  const auto old = update<T>(
      at, [=](T x) { return static_cast<T>(static_cast<std::make_unsigned_t<T>>(x) + value); });
  return planted(Fault::atom_old) ? static_cast<std::make_unsigned_t<T>>(old + value) : old;
}
template <class T>
inline auto atomic_min(uint8_t* at, std::make_unsigned_t<T> value) {
  return update<T>(at, [=](T x) { return x < static_cast<T>(value) ? x : static_cast<T>(value); });
}
template <class T>
inline auto atomic_max(uint8_t* at, std::make_unsigned_t<T> value) {
  return update<T>(at, [=](T x) { return x > static_cast<T>(value) ? x : static_cast<T>(value); });
}
template <class T>
inline auto atomic_and(uint8_t* at, T value) {
  return update<T>(at, [=](T x) { return x & value; });
}
template <class T>
inline auto atomic_or(uint8_t* at, T value) {
  return update<T>(at, [=](T x) { return x | value; });
}
template <class T>
inline auto atomic_xor(uint8_t* at, T value) {
  return update<T>(at, [=](T x) { return x ^ value; });
}
template <class T>
inline auto atomic_exch(uint8_t* at, T value) {
  return update<T>(at, [=](T) { return value; });
}
template <class T>
inline auto atomic_cas(uint8_t* at, std::make_unsigned_t<T> expected,
                       std::make_unsigned_t<T> value) {
  return update<T>(at, [=](T x) {
    return static_cast<std::make_unsigned_t<T>>(x) == expected || planted(Fault::atom_cas_always)
               ? static_cast<T>(value)
               : x;
  });
}
template <class T>
inline auto atomic_inc(uint8_t* at, T most) {
  return update<T>(at, [=](T x) { return x >= most ? T(0) : x + 1; });
}
template <class T>
inline auto atomic_dec(uint8_t* at, T most) {
  return update<T>(at, [=](T x) { return x == 0 || x > most ? most : x - 1; });
}
inline uint32_t atomic_add_f32(uint8_t* at, uint32_t value) {
  return update<uint32_t>(
      at, [=](uint32_t x) { return canonical_nan(float_bits(as_float(x) + as_float(value))); });
}
inline uint64_t atomic_add_f64(uint8_t* at, uint64_t value) {
  return update<uint64_t>(at,
                          [=](uint64_t x) { return double_bits(as_double(x) + as_double(value)); });
}
#define PTXEMU_ATOMIC_HALVES(op, type)                                                  \
  inline uint16_t atomic_##op##_##type(uint8_t* at, uint16_t value) {                   \
    return update<uint16_t>(at, [=](uint16_t x) { return op##_##type(x, value); });     \
  }                                                                                     \
  inline uint32_t atomic_##op##_##type##x2(uint8_t* at, uint32_t value) {               \
    return update<uint32_t>(at, [=](uint32_t x) { return op##_##type##x2(x, value); }); \
  }
PTXEMU_ATOMIC_HALVES(add, f16)
PTXEMU_ATOMIC_HALVES(min, f16)
PTXEMU_ATOMIC_HALVES(max, f16)
PTXEMU_ATOMIC_HALVES(add, bf16)
PTXEMU_ATOMIC_HALVES(min, bf16)
PTXEMU_ATOMIC_HALVES(max, bf16)
#undef PTXEMU_ATOMIC_HALVES

}  // namespace ptxemu
