// Arrays one after the other in one piece of memory, each at a multiple of 256 bytes: measured and placed by one walk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvfp4_moe::cuda {

class Spans {
 public:
  size_t total_bytes = 0;

 protected:
  // base null: measures.
  explicit Spans(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* const place = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + total_bytes);
    total_bytes += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return place;
  }

 private:
  std::byte* base_;
};

}  // namespace nvfp4_moe::cuda
