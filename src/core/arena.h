// Arena: measures and places arrays in a block of memory with one walk.
//
// A layout is a function that takes its arrays from an arena in a fixed order. With a null base it
// measures: every pointer is null and size_bytes() is the size of all arrays. With a real base the
// same function places them. Nothing is allocated, so a run may walk. Names are kept only if a
// layout is to be printed or guarded by a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace nvfp4_moe::internal {

// One array of a layout, for printing and for tests of offsets.
struct Span {
  std::string name;
  size_t offset_bytes = 0;
  size_t size_bytes = 0;
  bool operator==(const Span&) const = default;
};

class Arena {
 public:
  // Alignment of every array: the most that TMA, vector loads and cache lines need.
  static constexpr size_t kAlignment = 256;

  Arena() = default;
  // base: a multiple of kAlignment, or null. guard_bytes (tests only) follow every array. spans:
  // receives the names, or null.
  explicit Arena(std::byte* base, size_t guard_bytes = 0, std::vector<Span>* spans = nullptr)
      : base_(base), guard_bytes_(guard_bytes), spans_(spans) {}

  // Returns `count` elements of T, or null while measuring. The array's name is group + name: two
  // literals, so that placing allocates nothing.
  template <class T>
  T* take(const char* group, const char* name, int64_t count) {
    const size_t offset = add(size_bytes_, kAlignment - 1) / kAlignment * kAlignment;
    size_t size_bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(count), sizeof(T), &size_bytes))
      size_bytes = kTooLarge;
    if (spans_ != nullptr) keep_name(group, name, offset, size_bytes);
    size_bytes_ = add(add(offset, size_bytes), guard_bytes_);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }

  // The size of all arrays so far, including guards. A size that overflows becomes the largest
  // size_t, which no memory satisfies.
  size_t size_bytes() const { return size_bytes_; }

 private:
  static constexpr size_t kTooLarge = std::numeric_limits<size_t>::max();
  static size_t add(size_t a, size_t b) { return a > kTooLarge - b ? kTooLarge : a + b; }
  // A separate function, so that take, which every run calls some twenty times, is small enough to
  // be inlined.
  [[gnu::noinline, gnu::cold]] void keep_name(const char* group, const char* name, size_t offset,
                                              size_t size_bytes) {
    spans_->push_back({std::string(group) + name, offset, size_bytes});
  }

  std::byte* base_ = nullptr;
  size_t guard_bytes_ = 0;
  std::vector<Span>* spans_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace nvfp4_moe::internal
