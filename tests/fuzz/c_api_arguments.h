// Arguments for the C interface, drawn from fuzz bytes: numbers around every limit, and arrays and
// structs with exactly as much memory as the call declares, so that AddressSanitizer detects the
// first byte read or written past the end.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace nvfp4_moe::internal::fuzz {

class Arguments {
 public:
  Arguments(const uint8_t* data, size_t size) : provider_(data, size) {}

  bool more() { return provider_.remaining_bytes() > 0; }
  int pick(int count) { return provider_.ConsumeIntegralInRange<int>(0, count - 1); }
  // True once in 2^odds: deviations are rare enough that calls pass several checks.
  bool rarely(int odds = 4) {
    return provider_.ConsumeIntegralInRange<int>(0, (1 << odds) - 1) == 1;
  }

  // Numbers that no check may accept as a size of memory, and those around zero.
  int64_t bad_size() {
    using Limits = std::numeric_limits<int64_t>;
    static constexpr int64_t kBad[] = {0,
                                       -1,
                                       -16,
                                       1,
                                       17,
                                       Limits::max(),
                                       Limits::max() - 15,
                                       Limits::min(),
                                       Limits::min() + 16,
                                       int64_t{1} << 62,
                                       int64_t{1} << 59};
    return kBad[pick(static_cast<int>(std::size(kBad)))];
  }
  int64_t any_int64() { return provider_.ConsumeIntegral<int64_t>(); }
  const char* device() {
    static constexpr const char* kNames[] = {"cuda:0", "cuda:7", "cuda", "cuda:", "cpu", nullptr};
    return kNames[pick(6)];
  }
  int32_t enumerator(int count) {
    return rarely() ? provider_.ConsumeIntegral<int32_t>() : pick(count);
  }
  int64_t in(int64_t low, int64_t high) {
    return provider_.ConsumeIntegralInRange<int64_t>(low, high);
  }

  float number() {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    static constexpr float kSpecial[] = {
        0.0f,   -0.0f,   1.0f,   -1.0f, 0.5f,  1e-45f,
        1e-38f, 3.4e38f, 448.0f, kInf,  -kInf, std::numeric_limits<float>::quiet_NaN()};
    if (pick(2) == 0) return kSpecial[pick(static_cast<int>(std::size(kSpecial)))];
    const auto bits = provider_.ConsumeIntegral<uint32_t>();
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  float scale() { return rarely(3) ? number() : 1.0f / static_cast<float>(1 << pick(12)); }

  const char* backend() {
    static constexpr const char* kNames[] = {nullptr, "auto", "cpu",   "reference",
                                             "",      "none", "\xFF\n"};
    return kNames[pick(static_cast<int>(std::size(kNames)))];
  }

  // A separate allocation of `size` bytes; a few come from the input, the rest repeats them.
  uint8_t* bytes(int64_t size, uint8_t mask = 0xFF) {
    const auto seed = provider_.ConsumeBytes<uint8_t>(static_cast<size_t>(in(1, 24)));
    return fill(size, [&](size_t i) {
      return static_cast<uint8_t>(
          (seed.empty() ? i * 37 : seed[i % seed.size()] + i / seed.size() * 11) & mask);
    });
  }
  // Block scales: valid bytes except, rarely, anything.
  uint8_t* block_scales(int64_t size) {
    uint8_t* scales = bytes(size, 0x7F);
    if (!rarely(3))
      for (int64_t i = 0; i < size; ++i)
        if (scales[i] == 0x7F) scales[i] = 0x38;
    return scales;
  }
  float* floats(int64_t count) {
    auto* values = reinterpret_cast<float*>(fill(count * 4, [](size_t) { return uint8_t{0}; }));
    const float first = scale();
    for (int64_t i = 0; i < count; ++i) values[i] = first;
    if (count > 0) values[count - 1] = scale();
    return values;
  }
  uint8_t* zeros(int64_t size) {
    return fill(size, [](size_t) { return uint8_t{0}; });
  }
  // `count` indices of 4 or 8 bytes, from index(i); room for 8 bytes each.
  template <class Index>
  uint8_t* indices(int64_t count, bool narrow, Index&& index) {
    uint8_t* memory = zeros(count * 8);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t value = index(i);
      const auto low = static_cast<int32_t>(value);
      if (narrow)
        std::memcpy(memory + 4 * i, &low, 4);
      else
        std::memcpy(memory + 8 * i, &value, 8);
    }
    return memory;
  }
  // Mostly the pointer.
  template <class T>
  T* maybe(T* pointer) {
    return rarely(5) ? nullptr : pointer;
  }

  // Codes and block scales of matrices of `values` weights, in any struct that has these members.
  template <class T>
  void give_weights(T& to, int64_t values, bool gate = true) {
    if (gate) {
      to.gate_codes = maybe(bytes(values / 2));
      to.gate_block_scales = maybe(block_scales(values / 16));
    }
    to.up_codes = maybe(bytes(values / 2));
    to.up_block_scales = maybe(block_scales(values / 16));
    to.down_codes = maybe(bytes(values / 2));
    to.down_block_scales = maybe(block_scales(values / 16));
  }

  // The struct in memory of struct_size bytes: usually its own size, otherwise cut short (an older
  // header's) or longer.
  template <class T>
  T* structure(T value) {
    if (rarely(6)) return nullptr;
    size_t size = sizeof(T);
    uint8_t tail = 0;
    if (rarely(3)) {
      size = static_cast<size_t>(in(0, static_cast<int64_t>(sizeof(T)) + 64));
      tail = rarely(2) ? 1 : 0;
    }
    // The size field itself can always be read.
    auto* memory =
        fill(static_cast<int64_t>(std::max(size, sizeof(size_t))), [&](size_t) { return tail; });
    std::memcpy(memory, &value, std::min(size, sizeof(T)));
    std::memcpy(memory, &size, sizeof(size));
    return reinterpret_cast<T*>(memory);
  }
  // The value that the library reads from structure(value): fields that an older header's struct
  // lacks are zero.
  template <class T>
  static T as_read(const T* given, const T& value) {
    T read{};
    size_t size = 0;
    if (given != nullptr) std::memcpy(&size, given, sizeof(size));
    std::memcpy(&read, &value, std::min(size, sizeof(T)));
    return read;
  }

 private:
  template <class Byte>
  uint8_t* fill(int64_t size, Byte&& byte) {
    owned_.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(size)));
    for (size_t i = 0; i < static_cast<size_t>(size); ++i) owned_.back()[i] = byte(i);
    return owned_.back().get();
  }

  FuzzedDataProvider provider_;
  std::vector<std::unique_ptr<uint8_t[]>> owned_;
};

}  // namespace nvfp4_moe::internal::fuzz
