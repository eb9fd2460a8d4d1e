// Seeded numbers that are the same on every host: splitmix64 (Steele, Lea, Flood 2014), no libm, no
// std distributions.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal {

// One step of splitmix64 from state x: a good hash of x.
NVFP4_MOE_HOST_DEVICE constexpr uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    const uint64_t out = mix64(state_);
    state_ += 0x9E3779B97F4A7C15u;
    return out;
  }
  int64_t below(int64_t count) {
    return static_cast<int64_t>((next() >> 32) * static_cast<uint64_t>(count) >> 32);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  // Near-Gaussian, variance 1, within +-6: the sum of twelve uniforms. It involves no rounding that
  // could differ between hosts.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 6; ++i) {
      const uint64_t bits = next();
      sum += static_cast<double>(bits >> 32) * 0x1p-32 +
             static_cast<double>(bits & 0xFFFFFFFFu) * 0x1p-32;
    }
    return sum;
  }

 private:
  uint64_t state_;
};

}  // namespace nvfp4_moe::internal
