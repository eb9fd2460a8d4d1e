// The workspace size that was asked for last, by its token count.
//
// A size is a walk over a layer's arrays, some 80 ns. A call asks for it twice (to lease, and to check what it got),
// and decoding asks for the same token count layer after layer and step after step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nvfp4_moe {

class LastSize {
 public:
  // compute(tokens), or what it was. tokens: 0 to 2^31 - 1. Any thread may call.
  template <class Compute>
  size_t get(int64_t tokens, Compute&& compute) const {
    const uint64_t last = last_.load(std::memory_order_relaxed);
    const uint64_t key = static_cast<uint64_t>(tokens) << kSizeBits;
    if (last != kNone && last - key <= kMaxSize) return static_cast<size_t>(last - key);
    const size_t size_bytes = compute(tokens);
    if (size_bytes <= kMaxSize) last_.store(key | size_bytes, std::memory_order_relaxed);
    return size_bytes;
  }

 private:
  static constexpr int kSizeBits = 33;  // what is larger than 8 GiB is computed each time
  static constexpr uint64_t kMaxSize = (uint64_t{1} << kSizeBits) - 1;
  static constexpr uint64_t kNone = ~uint64_t{0};
  mutable std::atomic<uint64_t> last_{kNone};  // tokens and size in one word, so that both are of one call
};

}  // namespace nvfp4_moe
